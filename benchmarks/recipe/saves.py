"""Measures how long a save holds up a step in each async_mode, and how long the write takes.

    python -m benchmarks.recipe.saves --folder outputs/saves

It trains a model of about 100M parameters in this process and saves after every second step.
"""

import argparse
import runpy
import shutil
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

from torchtitan.checkpoint.manager import Checkpointer
from torchtitan.training.checkpoints.saves import Saves
from torchtitan.training.step import ForwardBackward

MODES = ("disabled", "async", "async_with_pinned_mem")


def timed(function: Callable[..., Any], spans: list[tuple[float, float]]) -> Callable[..., Any]:
    """Wrap the function so that `spans` gets the begin and the end of each call."""

    def call(*args: Any, **kwargs: Any) -> Any:
        begin = time.monotonic()
        try:
            return function(*args, **kwargs)
        finally:
            spans.append((begin, time.monotonic()))

    return call


def measure(mode: str, folder: str, saves: int) -> tuple[float, float, str]:
    """Train with this mode. Return how long a save holds up a step, how long a write takes, and a step's slow-down."""
    held, writes, steps = [], [], []
    originals = Saves.save, Checkpointer._write, ForwardBackward.__call__
    Saves.save = timed(originals[0], held)
    Checkpointer._write = timed(originals[1], writes)
    ForwardBackward.__call__ = timed(originals[2], steps)
    shutil.rmtree(folder, ignore_errors=True)
    options = f"""--job.dump_folder {folder} --model.flavor 100M --training.steps {2 * saves + 1} --training.seq_len 256
        --training.local_batch_size 2 --training.mixed_precision_param float32 --lr_scheduler.warmup_steps 1
        --metrics.log_freq 1 --metrics.no_enable_tensorboard
        --checkpoint.enable --checkpoint.interval 2 --checkpoint.async_mode {mode} --checkpoint.keep_latest_k 2"""
    sys.argv = ["train.py", *options.split()]
    runpy.run_path("train.py", run_name="__main__")
    Saves.save, Checkpointer._write, ForwardBackward.__call__ = originals
    held, writes = held[1:-1], writes[1:-1]  # the first save allocates memory; training waits for the last
    during = [end - begin for begin, end in steps[1:] if any(b < end and begin < e for b, e in writes)]
    alone = [end - begin for begin, end in steps[1:] if not any(b < end and begin < e for b, e in writes)]
    slower = f"{median(during) / median(alone):.2f}" if during else "-"
    return median(end - begin for begin, end in held), median(end - begin for begin, end in writes), slower


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", default="outputs/saves", help="on the disk to measure; is emptied and removed")
    parser.add_argument("--saves", type=int, default=6, help="saves in each mode (default: %(default)s)")
    args = parser.parse_args()
    print("| async_mode | a step is held | of `disabled` | the write takes | forward and backward beside it / alone |")
    print("| --- | --- | --- | --- | --- |")
    longest = 0.0
    for mode in MODES:
        held, write, slower = measure(mode, args.folder, args.saves)
        longest = longest or held
        print(f"| {mode} | {held:.2f} s | {held / longest:.1%} | {write:.2f} s | {slower} |", flush=True)
    shutil.rmtree(args.folder)


if __name__ == "__main__":
    main()
