"""Measures a restart: how long each part takes from starting a killed run again to its next step.

    python -m benchmarks.recipe.restart --ranks 2 -- --job.config_file train_configs/debug_model.toml

Times are those of the slowest rank, in seconds after the command. Options after `--` are train.py's.
"""

import argparse
import json
import os
import runpy
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torchtitan.launch.node import environment_here, torchrun_here

_ROOT = Path(__file__).parents[2]
_MARK = "marks of a rank: "


def run_as_rank() -> None:
    """Run train.py, note the time at which each part is done, and end the process after the first step."""
    marks = {"the launcher has started it": time.time()}

    def note(owner: Any, name: str, after: str, last: bool = False) -> None:
        function: Callable[..., Any] = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            marks.setdefault(after, time.time())
            if last:
                os.write(1, f"{_MARK}{json.dumps(marks)}\n".encode())  # one write: other ranks cannot split it
                os._exit(0)
            return result

        setattr(owner, name, call)

    from torchtitan import hardware
    from torchtitan.parallel import collectives
    from torchtitan.training import report, run, step
    from torchtitan.training.checkpoints import restore as checkpoints

    marks["torch and the project are imported"] = time.time()
    note(collectives, "start_process_group", "the ranks have met")
    note(checkpoints.Checkpoints, "__init__", "the checkpoint is found and its checksums are right")
    note(hardware, "find_peak", "the machine's peak is measured")
    note(run, "build_training_loader", "the data is open")
    note(run, "build_model", "the model is built")
    note(checkpoints.Checkpoints, "restore", "the checkpoint is loaded")
    note(step.ForwardBackward, "__call__", "forward and backward of the first step")
    note(report.Reporter, "add", "the first step is done", last=True)
    sys.argv[0] = str(_ROOT / "train.py")
    runpy.run_path(sys.argv[0], run_name="__main__")


def main() -> None:
    from titan_fleet.drill.verb import Run  # imports torch, which only the ranks should time

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="number of ranks on this machine (default: %(default)s)")
    parser.add_argument("--folder", type=Path, default=Path("outputs/restart"), help="where the run is kept")
    end = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    args = parser.parse_args(sys.argv[1:end])
    launcher = torchrun_here(args.ranks)
    folder = args.folder.absolute() / "run"
    folder.mkdir(parents=True, exist_ok=True)
    options = [*sys.argv[end + 1 :], "--checkpoint.interval", "5"]
    environment = environment_here(args.ranks)

    run = Run(folder, args.ranks, options, time.monotonic() + 600)
    run.start()
    run.wait_until((folder / "checkpoint/step-5").exists)
    run.kill()
    options += ["--checkpoint.enable", "--job.dump_folder", str(folder)]

    begin = time.time()
    again = subprocess.run(
        [sys.executable, *launcher, "-m", "benchmarks.recipe.restart", "--as_rank", *options],
        cwd=_ROOT, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    ranks = [json.loads(line.partition(_MARK)[2]) for line in again.stdout.splitlines() if _MARK in line]
    assert len(ranks) == args.ranks, again.stderr
    print("| | after the command | takes |\n| --- | --- | --- |")
    before = 0.0
    for what in ranks[0]:
        after = max(marks[what] for marks in ranks) - begin
        print(f"| {what} | {after:.1f} s | {after - before:.1f} s |")
        before = after


if __name__ == "__main__":
    if sys.argv[1:2] == ["--as_rank"]:
        del sys.argv[1]
        run_as_rank()
    else:
        main()
