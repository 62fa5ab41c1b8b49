"""Predicted and measured steps of several layouts of a preset, on all devices of this machine.

    NGPU=2 python -m torchtitan probe --out here.toml
    python -m benchmarks.planner.planned cpu-tiny --cluster here.toml

The layouts are spread evenly over all that the planner finds for the preset and that fit, from the fastest to the
slowest. All are timed in one process a rank, on a batch of zeros, as a probe times its steps. Options after `--` are
train.py's and override the preset.
"""

import argparse
import gc
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.recipe.run import PRESETS, ROOT
from titan_planner.plan.choice import changed
from titan_planner.plan.cluster import read_cluster
from titan_planner.plan.search import FILLED, Answer, Choice, Job, search
from torchtitan import hardware
from torchtitan.launch.node import environment_here, torchrun_here
from torchtitan.models.families import load_run_or_exit


def spread(answer: Answer, limit: float, count: int) -> list[tuple[int, int]]:
    """Table and index of layouts that fit: the fastest, the slowest and others between, evenly by rank."""
    fitting = sorted(
        (float(table.total[index]), number, int(index))
        for number, table in enumerate(answer.tables)
        for index in np.flatnonzero(table.peak <= limit)
    )
    chosen = np.unique(np.linspace(0, len(fitting) - 1, min(count, len(fitting))).astype(int))
    return [fitting[i][1:] for i in chosen]


def measure(options: argparse.Namespace, rest: list[str]) -> list[dict[str, Any]]:
    """This rank's part. Every rank returns the same seconds: those of the slowest."""
    import torch
    import torch.distributed as dist

    from titan_planner.probe.rank import ON_CPU, ON_GPU, Probe, Step
    from torchtitan.parallel import collectives

    place, cluster = hardware.read_place(), read_cluster(options.cluster)
    device = hardware.pick_device(place.local_rank)
    hardware.keep_to_own_cores(place, device)
    collectives.start_process_group(device, place.rank, place.world_size, 100)
    config, blueprint = load_run_or_exit(
        ["--job.config_file", str(PRESETS[options.preset]), *rest], place.world_size, 0
    )
    job = job_of(config, blueprint, place.world_size)
    cluster = replace(cluster, num_devices=place.world_size)
    answer, found = search(job, cluster, 1), []
    sizes = replace(ON_CPU if device.type == "cpu" else ON_GPU, seconds=0.0)
    probe = Probe(place, place.world_size, device, config.training.mixed_precision_param, sizes)
    for number, index in spread(answer, FILLED * cluster.memory_bytes, options.count):
        table = answer.tables[number]
        choice = table.choice(index)
        gc.collect()  # what the last layout held
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        step = Step(probe, changed(config, choice, job, table.counts), job.blueprint)
        seconds = torch.tensor(probe.seconds(step), dtype=torch.float64)
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
        del step
        row = {"layout": named(choice), "predicted": float(table.total[index]), "measured": float(seconds)}
        row |= {"gib_predicted": float(table.peak[index]) / 2**30, "gib_measured": hardware.peak_memory_gib(device)}
        found.append(row)
        if place.rank == 0 and options.out:  # what is measured by now is kept, whatever ends the rest
            options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    collectives.stop_process_group()
    return found


def job_of(config: Any, blueprint: Any, world_size: int) -> Job:
    batch = config.training.global_batch_size
    batch = config.training.local_batch_size * world_size if batch == -1 else batch
    return Job(blueprint, batch, config.training.seq_len, config.compile.model, False, False, lambda tp, cp: True, {})


def named(choice: Choice) -> str:
    degrees = {"pp": choice.pp, "dp": choice.dp * choice.replicas, "cp": choice.cp, "tp": choice.tp}
    axes = " x ".join(f"{name} {size}" for name, size in degrees.items() if size > 1) or "1 rank"
    stays = ", weights stay" * (choice.pp == 1 and choice.regathers == 0)
    return f"{axes}, {choice.passes} x {choice.microbatches} x {choice.microbatch}{stays}, recompute {choice.recompute}"


def report(rows: list[dict[str, Any]], rests_on: str) -> str:
    width = max(len(row["layout"]) for row in rows)
    lines = [f"{'layout':<{width}}  predicted  measured  error   GiB predicted  measured"]
    errors = [row["predicted"] / row["measured"] - 1 for row in rows]
    for row, error in zip(rows, errors, strict=True):
        lines.append(
            f"{row['layout']:<{width}}  {row['predicted']:9.4f} {row['measured']:9.4f} {error:+6.1%}"
            f"  {row['gib_predicted']:14.2f} {row['gib_measured']:9.2f}"
        )
    sizes = sorted(map(abs, errors))
    mean = f"mean {sum(sizes) / len(sizes):.1%}, largest {sizes[-1]:.1%}"
    return "\n".join([*lines, f"{len(rows)} layouts, errors of the step: {mean}; rests on {rests_on}"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("preset", choices=PRESETS)
    parser.add_argument("--cluster", type=Path, required=True, help="what a probe of this machine wrote")
    parser.add_argument("--count", type=int, default=10, help="layouts (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="a JSON file for the rows")
    end = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    options, rest = parser.parse_args(sys.argv[1:end]), sys.argv[end + 1 :]
    if "RANK" not in os.environ:
        ranks = read_cluster(options.cluster).machine.device.per_node
        command = [sys.executable, *torchrun_here(ranks), "-m", "benchmarks.planner.planned", *sys.argv[1:]]
        raise SystemExit(subprocess.run(command, cwd=ROOT, env=environment_here(ranks)).returncode)
    hardware.end_with_launcher()
    rows = measure(options, rest)
    if hardware.read_place().rank == 0:
        print(report(rows, read_cluster(options.cluster).rests_on), flush=True)


if __name__ == "__main__":
    main()
