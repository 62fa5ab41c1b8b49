"""Checks the nodes, then starts training: torchtitan.launch hands over to this module if PREFLIGHT=1."""

import os
import sys

from torchtitan.launch.start import begin_training, gpus_here, plan_start
from torchtitan.preflight import meet
from torchtitan.refusal import Refusal


def main(options: list[str]) -> None:
    gpus = gpus_here()
    start = plan_start(os.environ, options, gpus)
    if not meet.check(start, gpus):
        raise SystemExit(1)
    begin_training(start)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except Refusal as error:
        print(f"run_llama_train.sh: {error}", file=sys.stderr)
        raise SystemExit(2) from None
