"""The two runs of a comparison: plans them, refuses pairs that cannot be compared, and runs train.py for each."""

import argparse
import json
import math
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtitan.config.layout import ParallelDims, plan_batch, plan_layout
from torchtitan.config.load import load_config
from torchtitan.config.schema import Config, Parallelism
from torchtitan.launch.node import environment_here, torchrun_here
from torchtitan.refusal import Refusal
from torchtitan.root import ROOT

_TRAIN = ROOT / "train.py"
_TAIL_LINES = 40


@dataclass(frozen=True)
class ComparedRun:
    """One of the two runs: its command line, and the values that its configuration resolves to."""

    name: str  # A or B
    file: str
    options: list[str]  # of train.py, the file included
    config: Config
    dims: ParallelDims
    world_size: int
    global_batch_size: int

    def __str__(self) -> str:
        return f"{self.name}  {self.file}: {self.dims}"

    @property
    def folder(self) -> Path:
        return Path(self.config.job.dump_folder)

    @property
    def log(self) -> Path:
        return self.folder.with_suffix(".log")

    @property
    def command(self) -> list[str]:
        ranks = torchrun_here(self.world_size)
        return [sys.executable, *(ranks if self.world_size > 1 else []), os.path.relpath(_TRAIN), *self.options]


def infer_world_size(parallelism: Parallelism) -> int:
    """The smallest number of ranks for these degrees: their product, where a shard degree of -1 counts as 1."""
    return math.prod(abs(degree) for key, degree in parallelism if key.endswith("_degree"))


def plan_runs(args: argparse.Namespace, options: Sequence[str]) -> tuple[ComparedRun, ComparedRun]:
    """Plan both runs; refuse a pair that cannot be compared before either starts."""
    for option in options:
        if option.partition("=")[0].replace("-", "_") in ("__job.config_file", "__job.dump_folder"):
            raise Refusal(f"{option} after -- would be the same for both runs; name two files before it, and use --out")
    seed = load_config([*options, "--job.config_file", args.a]).debug.seed or 0
    a, b = (
        plan_run(name, file, options, seed, args.steps, world_size, Path(args.out))
        for name, file, world_size in [("A", args.a, args.world_size_a), ("B", args.b, args.world_size_b)]
    )
    if a.config.training.steps != b.config.training.steps:
        steps = a.config.training.steps, b.config.training.steps
        raise Refusal(
            f"training.steps = {steps[0]} in A and {steps[1]} in B, but every step needs its counterpart; use the same "
            f"number in both, as with --steps {min(steps)}"
        )
    if a.global_batch_size != b.global_batch_size:
        common = math.lcm(a.global_batch_size, b.global_batch_size)
        raise Refusal(
            f"training.global_batch_size comes to {a.global_batch_size} in A ({a.dims}) and {b.global_batch_size} in B "
            f"({b.dims}), so the runs would see different batches; use the same in both, as with "
            f"-- --training.global_batch_size {common} (its default grows with the data-parallel degree)"
        )
    return a, b


def plan_run(
    name: str, file: str, options: Sequence[str], seed: int, steps: int | None, world_size: int | None, out: Path
) -> ComparedRun:
    argv = ["--job.config_file", file, *options, "--debug.seed", str(seed), "--metrics.log_freq", "1"]
    argv += ["--job.dump_folder", str(out / name.lower())]
    given = load_config(argv)
    if given.checkpoint.enable:  # only for initial weights: the run saves nothing and resumes nothing
        argv += ["--checkpoint.load_only", "--checkpoint.no_create_seed_checkpoint"]
        argv += ["--checkpoint.no_last_save_in_hf"]
        argv += ["--checkpoint.folder", "none", "--checkpoint.load_step", "-1"]
    if steps is not None:
        schedule = given.lr_scheduler.total_steps or given.training.steps
        argv += ["--training.steps", str(steps)]
        if steps < schedule:  # keep the learning rates of the full run, instead of a shorter schedule
            argv += ["--lr_scheduler.total_steps", str(schedule)]
    if world_size is None:
        world_size = infer_world_size(given.parallelism)
    elif world_size < 1:
        raise Refusal(f"--world_size_{name.lower()} = {world_size}, but a run has at least one rank; use 1 or more")
    config = load_config(argv, world_size)
    dims = plan_layout(config.parallelism, world_size)
    return ComparedRun(
        name, file, argv, config, dims, world_size, plan_batch(config.training, dims.dp).global_batch_size
    )


def train(
    run: ComparedRun, limit_seconds: float | None = None, more: Mapping[str, str] | None = None
) -> list[dict[str, Any]]:
    """Run train.py in its own processes, with its output in a log; returns its records.

    A run that takes longer than the limit is ended. `more`: environment variables.
    """
    print(f"{run}, {run.config.training.steps} steps, log {run.log}", flush=True)
    begin = time.perf_counter()
    with run.log.open("w", encoding="utf-8") as log:
        print(f"$ {shlex.join(run.command)}", file=log, flush=True)
        env = {**environment_here(run.world_size), **(more or {})}
        process = subprocess.Popen(run.command, stdout=log, stderr=subprocess.STDOUT, env=env)
        try:
            code = process.wait(limit_seconds)
        except (KeyboardInterrupt, subprocess.TimeoutExpired) as stopped:
            process.terminate()  # on SIGTERM torchrun ends its ranks; Ctrl-C or its own death would not
            process.wait()
            if isinstance(stopped, KeyboardInterrupt):
                raise
            raise Refusal(f"run {run.name} took longer than {limit_seconds:.0f} s; its log is {run.log}") from None
    if code:
        tail = run.log.read_text(encoding="utf-8", errors="replace").splitlines()[-_TAIL_LINES:]
        raise Refusal(
            f"run {run.name} ended with exit code {code}; the end of {run.log}:\n" + "\n".join(f"  {x}" for x in tail)
        )
    print(f"   {time.perf_counter() - begin:.0f} s", flush=True)
    return [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
