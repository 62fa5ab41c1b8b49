"""Measures how fast train.py is on this machine. Prints a table, and writes it as JSON to benchmarks/results.

    python -m benchmarks.recipe.run cpu-60m

A preset is a TOML file in benchmarks/recipe/presets. It starts ./run_llama_train.sh with it, as a user would.
Options after `--` are train.py's and override the preset.
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.recipe.where import shares
from torchtitan.config.load import load_config
from torchtitan.config.schema import Config

ROOT = Path(__file__).parents[2]
WATCHED = 5  # steps that a profile records
PRESETS = {path.stem: path for path in sorted((ROOT / "benchmarks/recipe/presets").glob("*.toml"))}


def measure(preset: str, options: list[str], warmup: int, root: Path = ROOT, profile: bool = False) -> dict[str, Any]:
    """Run the preset with the code in `root`. Return the figures of its steps after warm-up, and a profile if asked."""
    config = load_config(["--job.config_file", str(PRESETS[preset]), *options])
    with tempfile.TemporaryDirectory() as folder:
        watching = watch_further_steps(config) if profile else []
        first_step_seconds = train(preset, [*options, *watching], Path(folder), root)
        records = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
        records = [record for record in records if record["step"] <= config.training.steps]
        figures = summarize(records, first_step_seconds, warmup)
        if profile:
            figures["shares"] = shares(next(Path(folder).rglob("rank0.json")))
        return figures


def watch_further_steps(config: Config) -> list[str]:
    """Return options that make a run continue past its last step and profile five more steps, for `shares`.

    The step before the last one is logged. Logging waits for the GPU, so nothing else runs on it when the last begins.
    """
    log_freq, profiling = config.metrics.log_freq, config.profiling
    before = config.training.steps + profiling.profiler_warmup + WATCHED - 1
    steps = str(-(-before // log_freq) * log_freq + 1)
    watching = ["--profiling.enable_profiling", "--profiling.profiler_active", str(WATCHED)]
    return ["--training.steps", steps, *watching, "--profiling.profile_freq", steps]


def train(preset: str, options: list[str], folder: Path, root: Path = ROOT) -> float:
    """Run the preset in this folder. Return the seconds from the command to the end of the first step."""
    begin, first = time.monotonic(), 0.0
    written, log = folder / "metrics.jsonl", folder / "log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [str(root / "run_llama_train.sh"), *options, "--job.dump_folder", str(folder)],
            cwd=root,
            env={"PYTHON": sys.executable, **os.environ, "CONFIG_FILE": str(PRESETS[preset])},
            stdout=output,
            stderr=output,
        )
        while process.poll() is None:
            if not first and written.exists() and written.stat().st_size:
                first = time.monotonic() - begin
            time.sleep(0.02)
    if process.returncode:
        raise SystemExit(log.read_text())
    return first


def summarize(records: list[dict[str, Any]], first_step_seconds: float, warmup: int) -> dict[str, Any]:
    """Return the figures of the median step after warm-up. A record holds the mean of the steps since the last."""
    steps = [record for before, record in pairwise(records) if before["step"] >= warmup]
    if len(steps) < 2:
        raise SystemExit(
            f"after the first {warmup} steps the run logged {len(steps)}, but quartiles need at least 2; raise "
            "--training.steps or lower --metrics.log_freq"
        )
    seconds = statistics.median(record["step_seconds"] for record in steps)
    below, _, above = statistics.quantiles((record["step_seconds"] for record in steps), n=4)
    of_median = steps[-1]["step_seconds"] / seconds
    return {
        "tokens_per_second": steps[-1]["tokens_per_second"] * of_median,
        "tflops": steps[-1]["tflops"] * of_median,
        "mfu": steps[-1]["mfu"] * of_median,
        "memory_gib": max(record["memory_gib"] for record in records),
        "first_step_seconds": first_step_seconds,
        "step_seconds": seconds,
        "step_seconds_quartiles": [below, above],
        "data_share": statistics.median(record["data_seconds"] for record in steps) / seconds,
        "loss": steps[-1]["loss"],
    }


def describe_machine() -> dict[str, str]:
    """Return what a figure depends on besides the code: device, its matrix product's rate, versions, commit."""
    import torch

    from torchtitan import hardware

    describe = ["git", "describe", "--always", "--dirty"]
    commit = subprocess.run(describe, cwd=ROOT, capture_output=True, text=True).stdout if shutil.which("git") else ""
    device = hardware.pick_device(0)
    peak = hardware.measure_matmul_flops(device, torch.bfloat16, seconds=2.0)
    return {
        "device": hardware.describe_device(device),
        "product_tflops": f"{peak / 1e12:.3f}",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": commit.strip() or "unknown",
    }


def publish(preset: str, options: list[str], figures: dict[str, Any], out: Path) -> None:
    """Print the tables and write the JSON. Call after all runs: on a GPU this takes memory that the process keeps."""
    machine = describe_machine()
    show(" ".join([preset, *options]), machine, figures)
    if "shares" in figures:
        print("\n| where a step's time goes | |\n| --- | --- |")
        print("\n".join(f"| {sort} | {share:.1%} |" for sort, share in figures["shares"].items()))
    out.mkdir(parents=True, exist_ok=True)
    about = {"preset": preset, "options": options, "config": PRESETS[preset].read_text()}
    result = out / f"{preset}-{machine['commit']}.json"
    result.write_text(json.dumps(about | {"machine": machine, "figures": figures}, indent=1) + "\n")


def show(title: str, machine: dict[str, str], figures: dict[str, Any]) -> None:
    low, high = figures["step_seconds_quartiles"]
    print(f"{title}: {', '.join(f'{name} {value}' for name, value in machine.items())}\n\n| | |\n| --- | --- |")
    for name, value in {
        "tokens/s a device": f"{figures['tokens_per_second']:,.0f}",
        "TFLOP/s a device": f"{figures['tflops']:.3f}",
        "MFU": f"{figures['mfu']:.1%}",
        "share of the measured bf16 matrix product": f"{figures['tflops'] / float(machine['product_tflops']):.1%}",
        "peak memory": f"{figures['memory_gib']:.2f} GiB",
        "time to the first step": f"{figures['first_step_seconds']:.1f} s",
        "step": f"{figures['step_seconds']:.3f} s (quartiles {low:.3f}, {high:.3f})",
        "share of a step waiting for data": f"{figures['data_share']:.2%}",
    }.items():
        print(f"| {name} | {value} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("preset", choices=PRESETS, help="the TOML file in benchmarks/recipe/presets to train")
    parser.add_argument("--warmup", type=int, default=5, help="how many first steps to ignore (default: %(default)s)")
    parser.add_argument("--profile", action="store_true", help="also show where the time goes in five further steps")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results", help="folder for the JSON")
    end = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    args, options = parser.parse_args(sys.argv[1:end]), sys.argv[end + 1 :]
    publish(args.preset, options, measure(args.preset, options, args.warmup, profile=args.profile), args.out)


if __name__ == "__main__":
    main()
