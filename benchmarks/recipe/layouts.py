"""Times a step under each layout of 8 ranks on this machine's CPU, relative to FSDP over all 8.

    python -m benchmarks.recipe.layouts

The times are for orientation only. The ranks share this machine's cores and memory, so a time is the sum of their work
and tells nothing about a cluster's network.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from torchtitan.launch.node import environment_here, torchrun_here

ROOT = Path(__file__).parents[2]
RANKS = 8
GLOBAL_BATCH = 8
_REPLICATE, _TP, _CP, _PP, _SCHEDULE = (
    "data_parallel_replicate_degree",
    "tensor_parallel_degree",
    "context_parallel_degree",
    "pipeline_parallel_degree",
    "pipeline_parallel_schedule",
)
LAYOUTS: dict[str, dict[str, int | str]] = {
    "FSDP 8": {},
    "HSDP 2 x 4": {_REPLICATE: 2},
    "plain data parallelism 8": {_REPLICATE: 8},
    "TP 8": {_TP: 8},
    "FSDP 4 x TP 2": {_TP: 2},
    "CP 8": {_CP: 8},
    "FSDP 4 x CP 2": {_CP: 2},
    "FSDP 4 x PP 2, 1F1B": {_PP: 2},
    **{
        f"FSDP 2 x TP 2 x PP 2, {schedule}": {_TP: 2, _PP: 2, _SCHEDULE: schedule}
        for schedule in ("1F1B", "Interleaved1F1B", "ZBVZeroBubble")
    },
    "CP 2 x TP 2 x PP 2, 1F1B": {_CP: 2, _TP: 2, _PP: 2},
    "HSDP 2 x 1 x TP 2 x PP 2, 1F1B": {_REPLICATE: 2, _TP: 2, _PP: 2},
}


def seconds_a_step(keys: dict[str, int | str], folder: str, steps: int) -> float:
    batch_ranks = RANKS // (int(keys.get(_TP, 1)) * int(keys.get(_CP, 1)) * int(keys.get(_PP, 1)))
    command = [sys.executable, *torchrun_here(RANKS), "train.py"]
    command += ["--job.config_file=train_configs/debug_model.toml", f"--job.dump_folder={folder}"]
    command += [f"--training.steps={steps}", f"--training.global_batch_size={GLOBAL_BATCH}"]
    command += [
        f"--training.local_batch_size={GLOBAL_BATCH // batch_ranks}",
        "--metrics.log_freq=1",
        "--lr_scheduler.warmup_steps=1",
    ]
    command += [
        "--validation.no_enable",
        "--metrics.sample_freq=None",
        "--checkpoint.no_enable",
        *(f"--parallelism.{key}={value}" for key, value in keys.items()),
    ]
    subprocess.run(command, cwd=ROOT, env=environment_here(RANKS), check=True, capture_output=True)
    lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    return statistics.median(json.loads(line)["step_seconds"] for line in lines[2:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=12, help="in each layout; the first two are not timed")
    options = parser.parse_args()
    print("| layout | seconds a step | relative to FSDP 8 |\n| --- | --- | --- |")
    reference = None
    for name, keys in LAYOUTS.items():
        with tempfile.TemporaryDirectory() as folder:
            seconds = seconds_a_step(keys, folder, options.steps)
        reference = reference or seconds
        print(f"| {name} | {seconds:.2f} | {seconds / reference:.2f} |", flush=True)


if __name__ == "__main__":
    main()
