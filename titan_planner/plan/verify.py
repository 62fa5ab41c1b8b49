"""`plan CONFIG.toml --cluster FILE.toml --verify K`: runs some layouts on this machine, and compares.

Each layout is a run of train.py in its own processes. A run that fails counts as failed, and its reason is shown.
"""

import argparse
import json
import os
import random
import shutil
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np

from titan_planner.plan.cluster import Cluster
from titan_planner.plan.like import write_layout
from titan_planner.plan.search import FILLED, Answer, Job
from torchtitan.config.load import ConfigError
from torchtitan.config.schema import Config
from torchtitan.launch.node import KEEP_FREED_MEMORY, num_cores
from torchtitan.launch.start import count_gpus
from torchtitan.observe.planned import compare, read_steps
from torchtitan.refusal import Refusal
from torchtitan.tools.compare.runs import plan_run, train

_LEAST_STEPS = 5  # three warm up
_QUIET = {  # what would only take time
    "metrics": {"log_freq": 1, "sample_freq": None, "enable_tensorboard": False, "enable_wandb": False},
    "checkpoint": {"enable": False},
    "validation": {"enable": False},
    "profiling": {"enable_profiling": False, "enable_memory_snapshot": False},
}


@dataclass
class Trial:
    """A layout, what was predicted of it, and the median step of each of its runs."""

    layout: str
    predicted: float
    file: Path
    is_best: bool  # one of the K; the others are drawn
    seconds: list[float] = field(default_factory=list)
    phases: list[dict[str, dict[str, float]]] = field(default_factory=list)
    failed: str = ""

    @property
    def measured(self) -> float | None:
        return fmean(self.seconds) if self.seconds and not self.failed else None

    @property
    def spread(self) -> float:
        """How far the repeats are apart, as part of their mean."""
        return (max(self.seconds) - min(self.seconds)) / fmean(self.seconds) if len(self.seconds) > 1 else 0.0


def verify(
    args: argparse.Namespace, options: Sequence[str], config: Config, job: Job, cluster: Cluster, answer: Answer
) -> None:
    least = {"verify": 1, "others": 0, "repeats": 1, "steps": _LEAST_STEPS}
    for name, value in least.items():
        if getattr(args, name) < value:
            raise Refusal(f"--{name} {getattr(args, name)}: use {value} or more")
    refuse_other_machines(cluster)
    trials = choose(args, config, job, cluster, answer)
    print(f"{len(trials)} layouts are run for {args.steps} steps, {args.repeats} times each, in {args.runs}")
    measure(trials, args, cluster.num_devices)
    verdict = judge(trials)
    kept: dict[str, Any] = {"cluster": cluster.name, "rests_on": cluster.rests_on, "options": list(options), **verdict}
    kept["layouts"] = [vars(trial) | {"file": str(trial.file), "measured": trial.measured} for trial in trials]
    (args.runs / "verify.json").write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    print(shown(trials, verdict) + f"\n{args.runs / 'verify.json'} keeps all of it")


def refuse_other_machines(cluster: Cluster) -> None:
    gpus = count_gpus(os.environ.get("CUDA_VISIBLE_DEVICES"))
    here, what = (gpus, "GPUs") if gpus else (num_cores(), "CPU cores and no GPU")
    if cluster.num_devices > here:
        raise Refusal(
            f"--verify runs layouts on this machine, which has {here} {what}, but {cluster.name} has "
            f"{cluster.num_devices} devices; use a file of this machine, such as clusters/cpu_1x2.toml"
        )


def choose(args: argparse.Namespace, config: Config, job: Job, cluster: Cluster, answer: Answer) -> list[Trial]:
    """The best K, and others spread over the list of all that fit, with a seed; only such as `check` accepts."""
    quiet = config.model_copy(
        update={name: getattr(config, name).model_copy(update=values) for name, values in _QUIET.items()}
    )
    shutil.rmtree(args.runs / "layouts", ignore_errors=True)
    trials: list[Trial] = []

    def takes(places: Iterable[tuple[int, int]], most: int, is_best: bool) -> None:
        for place in places:
            if most <= 0:
                return
            path = args.runs / "layouts" / f"{len(trials)}.toml"
            try:
                said = write_layout(path, quiet, job, cluster, answer, place, [args.file, "--verify"])
            except ConfigError:
                continue
            trials.append(Trial(said["layout"], said["seconds"], path, is_best))
            most -= 1

    takes(answer.best, args.verify, is_best=True)
    rest = [place for place in by_time(answer, cluster) if place not in answer.best]
    chance = random.Random(args.seed)
    for part in np.array_split(np.arange(len(rest)), max(1, args.others)):
        drawn = [rest[int(index)] for index in part]
        takes(chance.sample(drawn, len(drawn)), min(1, args.others), is_best=False)
    return trials


def by_time(answer: Answer, cluster: Cluster) -> list[tuple[int, int]]:
    """All layouts that fit, fastest first."""
    found = []
    for number, table in enumerate(answer.tables):
        fits = np.flatnonzero(table.peak <= FILLED * cluster.memory_bytes)
        found += [(float(table.total[index]), number, int(index)) for index in fits]
    return [(number, index) for _, number, index in sorted(found)]


def measure(trials: Sequence[Trial], args: argparse.Namespace, ranks: int) -> None:
    """Every layout once, in an order drawn at random, then every one once more: a machine may get slower with time."""
    ends, chance = time.monotonic() + 60 * args.minutes, random.Random(args.seed)
    for repeat in range(args.repeats):
        for trial in chance.sample(list(trials), len(trials)):
            left = ends - time.monotonic()
            if trial.failed:
                continue
            if left <= 0:
                trial.failed = f"was not run {args.repeats} times: --minutes {args.minutes:g} are over"
                continue
            name = f"{trial.file.stem}-{repeat + 1}"
            run = plan_run(name, str(trial.file), [], 0, args.steps, ranks, args.runs)
            shutil.rmtree(run.folder, ignore_errors=True)
            try:
                train(run, left, KEEP_FREED_MEMORY)
                steps = read_steps(run.folder)
            except Refusal as error:
                trial.failed = str(error)
                continue
            trial.seconds.append(median(record["step_seconds"] for record in steps))
            rows = compare(json.loads(trial.file.with_suffix(".json").read_text(encoding="utf-8")), steps)
            trial.phases.append({name: {"predicted": said, "measured": found} for name, said, found in rows})


def judge(trials: Sequence[Trial]) -> dict[str, float | int | None]:
    """Rank correlation of predicted and measured, and the regret: the chosen's time over the best's, less 1."""
    ran = [(trial.predicted, trial.measured) for trial in trials if trial.measured is not None]
    chosen = trials[0].measured if trials else None
    return {
        "kendall_tau": kendall(ran) if len(ran) > 1 else None,
        "regret": regret(ran) if chosen is not None else None,
        "spread_of_repeats": max((trial.spread for trial in trials), default=0.0),
        "failed": sum(bool(trial.failed) for trial in trials),
    }


def kendall(pairs: Sequence[tuple[float, float]]) -> float:
    """Kendall's tau-b: pairs of layouts in the right order less those in the wrong one, of those that are no ties."""
    signs = [(np.sign(a[0] - b[0]), np.sign(a[1] - b[1])) for a, b in combinations(pairs, 2)]
    untied = [sum(abs(sign[side]) for sign in signs) for side in (0, 1)]
    return float(sum(x * y for x, y in signs) / np.sqrt(untied[0] * untied[1])) if all(untied) else 0.0


def regret(pairs: Sequence[tuple[float, float]]) -> float:
    """The first of equal predictions is the chosen."""
    return min(pairs, key=lambda pair: pair[0])[1] / min(measured for _, measured in pairs) - 1


def shown(trials: Sequence[Trial], verdict: dict[str, float | int | None]) -> str:
    width = max(len(trial.layout) for trial in trials)
    lines = [f"     {'layout':<{width}}  predicted   measured   error  of each run"]
    for number, trial in enumerate(trials):
        mark = str(number + 1) if trial.is_best else "-"
        line = f"{mark:>4} {trial.layout:<{width}} {trial.predicted:10.4f}"
        if trial.measured is None:
            reasons = trial.failed.splitlines()
            lines.append(f"{line}     failed: {reasons[0]}")
            lines += [f"       {reason}" for reason in reasons[-3:]] if len(reasons) > 1 else []
        else:
            each = " ".join(f"{seconds:.4f}" for seconds in trial.seconds)
            lines.append(f"{line} {trial.measured:10.4f} {trial.predicted / trial.measured - 1:+7.1%}  {each}")
    tau, above = verdict["kendall_tau"], verdict["regret"]
    lines.append(f"rank correlation (Kendall's tau): {'unknown' if tau is None else f'{tau:.2f}'}")
    lines.append(
        f"regret: {'unknown, the chosen failed' if above is None else f'{above:.1%}'}; "
        f"spread of the repeats up to {verdict['spread_of_repeats']:.1%}; {verdict['failed']} failed"
    )
    return "\n".join(lines)
