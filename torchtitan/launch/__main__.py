"""`python -m torchtitan.launch [options of train.py]`: run_llama_train.sh calls this once there is a Python.

Nothing else in the code starts a run of several nodes. With PREFLIGHT=1 torchtitan.preflight takes over, which checks
the nodes before it starts training.
"""

import os
import shlex
import sys

from torchtitan.launch.start import begin_training, gpus_here, only_prints, plan_start, python_here
from torchtitan.refusal import Refusal


def main(options: list[str]) -> None:
    start = plan_start(os.environ, options, gpus_here())
    python = python_here()
    if start.understood:
        settings = [f"{name}={shlex.quote(value)}" for name, value in start.settings.items()]
        print(start.understood)
        print(" ".join([*settings, shlex.join([python, *start.arguments])]), flush=True)
    if only_prints(os.environ):
        return
    if (os.environ.get("PREFLIGHT") or "0") != "0":
        os.execv(python, [python, "-m", "torchtitan.preflight", *options])
    begin_training(start)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except Refusal as error:
        print(f"run_llama_train.sh: {error}", file=sys.stderr)
        raise SystemExit(2) from None
