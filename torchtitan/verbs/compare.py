"""Trains two configurations from one seed, one after the other, and says how far their losses come apart.

python -m torchtitan compare A.toml B.toml

Each is a real run of train.py in processes of its own; only what makes the curves incomparable is refused.
"""

import argparse
import json
import math
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtitan.config.layout import ParallelDims, plan_batch, plan_layout
from torchtitan.config.load import flat, key_names, load_config
from torchtitan.config.schema import Config, Parallelism
from torchtitan.launch.node import environment_here, torchrun_here
from torchtitan.refusal import Refusal

_TRAIN = Path(__file__).parents[2] / "train.py"
_MOST_ROWS = 12
_TAIL_LINES = 40

# What may differ between two runs whose losses ought to be the same.
_HOW_SECTIONS = {
    "profiling", "metrics", "parallelism", "checkpoint", "activation_checkpoint", "compile", "comm", "validation"
}  # fmt: skip
_HOW_KEYS = {
    "job.description",
    "job.print_config",
    "optimizer.implementation",
    "training.local_batch_size",
    "training.gc_freq",
    "debug.deterministic",
    "debug.deterministic_warn_only",
}


@dataclass(frozen=True)
class Run:
    """One of the two: what is started, and what its configuration comes to."""

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


@dataclass(frozen=True)
class Gap:
    """How far one number of the two runs is apart at each step, and how far it may be."""

    what: str
    steps: list[int]
    values: list[float]
    bound: float

    @property
    def largest(self) -> int:
        """Index of the largest difference."""
        return max(range(len(self.values)), key=self.values.__getitem__)

    @property
    def first_over(self) -> int | None:
        """Index of the first difference over the bound; a bound of NaN holds for nothing."""
        return next((i for i, value in enumerate(self.values) if not value <= self.bound), None)

    def verdict(self) -> str:
        if self.first_over is None:
            return f"{self.what} within {self.bound:.1e} at every step"
        return f"{self.what} over {self.bound:.1e}, first at step {self.steps[self.first_over]}"

    def describe_largest(self) -> str:
        largest = self.values[self.largest]
        return f"{largest:.1e} at step {self.steps[self.largest]}" if largest else "none, the same at every step"


@dataclass(frozen=True)
class Comparison:
    """The logged steps of both runs and their differences."""

    a: list[dict[str, Any]]
    b: list[dict[str, Any]]
    loss: Gap
    norm: Gap

    @property
    def alike(self) -> bool:
        return self.loss.first_over is None and self.norm.first_over is None

    def verdict(self) -> str:
        return f"{'ALIKE' if self.alike else 'DIFFERENT'}: {self.loss.verdict()}; {self.norm.verdict()}"


def compare_records(
    a: list[dict[str, Any]], b: list[dict[str, Any]], loss_bound: float, norm_bound: float
) -> Comparison:
    """Hold the runs' records against each other, step by step."""
    steps = [record["step"] for record in a]
    if steps != [record["step"] for record in b] or not steps:
        raise Refusal(
            f"A has records of {_describe_steps(a)} and B of {_describe_steps(b)}, so they cannot be compared step by "
            f"step; see the end of both logs for why (the data ended, the disk was full)"
        )

    def gap(what: str, key: str, bound: float) -> Gap:
        return Gap(what, steps, [_difference(x[key], y[key]) for x, y in zip(a, b, strict=True)], bound)

    return Comparison(a, b, gap("loss", "loss", loss_bound), gap("gradient norm", "grad_norm", norm_bound))


def _difference(a: float | None, b: float | None) -> float:
    """Relative to the larger of the two; a value that was not finite (None in a record) equals only another such."""
    if a is None or b is None:
        return 0.0 if a is b else math.inf
    return 0.0 if a == b else abs(a - b) / max(abs(a), abs(b))


def _describe_steps(records: list[dict[str, Any]]) -> str:
    return f"{len(records)} steps up to {records[-1]['step']}" if records else "no step"


def differing_keys(a: Run, b: Run) -> tuple[list[str], list[str]]:
    """A line for each key that differs, in two lists: keys that say how to compute, and keys that say what to train."""
    how: list[str] = []
    what: list[str] = []
    values = [flat(run.config.model_dump()) for run in (a, b)]
    for run, dotted in zip((a, b), values, strict=True):  # a default of -1 is compared by the number it resolves to
        dotted["training.global_batch_size"] = run.global_batch_size
        if dotted["training.num_streams"] == -1:
            dotted["training.num_streams"] = run.global_batch_size
    for name in key_names():
        section = name.partition(".")[0]
        x, y = (dotted[name] for dotted in values)
        if x != y and name not in ("job.config_file", "job.dump_folder"):
            line = f"{name}: A {json.dumps(x)}, B {json.dumps(y)}"
            is_how = section in _HOW_SECTIONS and not name.startswith(("checkpoint.initial_load", "checkpoint.exclude"))
            (how if is_how or name in _HOW_KEYS else what).append(line)
    return how, what


def describe(a: Run, b: Run, comparison: Comparison) -> str:
    """The result as a page of text."""
    how, what = differing_keys(a, b)
    seq_len = a.config.training.seq_len
    lines = [str(a), str(b)]
    lines += [f"{len(comparison.a)} steps, global batch {a.global_batch_size} x {seq_len} tokens"]
    lines[-1] += f", seed {a.config.debug.seed} for both"
    for differing, meaning in (
        (how, "how to compute, which should change no loss"),
        (what, "what to train, so that other losses are to be expected"),
    ):
        if differing:
            lines += ["", f"keys that differ and say {meaning}:", *(f"  {line}" for line in differing)]
    lines += ["", *_table(comparison), "", "largest relative difference:"]
    for gap in (comparison.loss, comparison.norm):
        lines += [f"  {gap.what + ':':14} {gap.describe_largest()}"]
    return "\n".join([*lines, "", comparison.verdict(), ""])


def _table(comparison: Comparison) -> list[str]:
    """A row a step; of a long run some evenly, the largest differences and the first ones over a bound."""
    width = max(4, len(str(comparison.loss.steps[-1])))
    rows = [f"{'step':>{width}}  {'loss A':>10}  {'loss B':>10}  {'difference':>10}  {'in gradient norm':>16}"]
    for i in _shown(comparison):
        losses = (math.nan if run[i]["loss"] is None else run[i]["loss"] for run in (comparison.a, comparison.b))
        row = [f"{comparison.loss.steps[i]:{width}}", *(f"{loss:10.6f}" for loss in losses)]
        rows.append("  ".join([*row, f"{comparison.loss.values[i]:10.1e}", f"{comparison.norm.values[i]:16.1e}"]))
    return rows


def _shown(comparison: Comparison) -> list[int]:
    count = len(comparison.a)
    if count <= _MOST_ROWS:
        return list(range(count))
    evenly = {round(i * (count - 1) / (_MOST_ROWS - 3)) for i in range(_MOST_ROWS - 2)}
    gaps = (comparison.loss, comparison.norm)
    special = {gap.largest for gap in gaps} | {gap.first_over for gap in gaps if gap.first_over is not None}
    return sorted(evenly | special)


def infer_world_size(parallelism: Parallelism) -> int:
    """The fewest ranks that hold all degrees: their product, a shard degree of -1 being 1."""
    return math.prod(abs(degree) for key, degree in parallelism if key.endswith("_degree"))


def plan_runs(args: argparse.Namespace, options: Sequence[str]) -> tuple[Run, Run]:
    """Both runs as they will be started; refuses what cannot be compared before anything is run."""
    for option in options:
        if option.partition("=")[0].replace("-", "_") in ("__job.config_file", "__job.dump_folder"):
            raise Refusal(f"{option} after -- would name the same for both; name the two files first, and use --out")
    seed = load_config([*options, "--job.config_file", args.a]).debug.seed or 0
    a, b = (
        _plan_run(name, file, options, seed, args.steps, world_size, Path(args.out))
        for name, file, world_size in [("A", args.a, args.world_size_a), ("B", args.b, args.world_size_b)]
    )
    if a.config.training.steps != b.config.training.steps:
        steps = a.config.training.steps, b.config.training.steps
        raise Refusal(
            f"training.steps = {steps[0]} in A and {steps[1]} in B, but step is compared with step; use the same in "
            f"both, as with --steps {min(steps)}"
        )
    if a.global_batch_size != b.global_batch_size:
        common = math.lcm(a.global_batch_size, b.global_batch_size)
        raise Refusal(
            f"training.global_batch_size comes to {a.global_batch_size} in A ({a.dims}) and {b.global_batch_size} in B "
            f"({b.dims}), so they would see different batches; use the same in both, as with "
            f"-- --training.global_batch_size {common} (its default grows with the data-parallel degree)"
        )
    return a, b


def _plan_run(
    name: str, file: str, options: Sequence[str], seed: int, steps: int | None, world_size: int | None, out: Path
) -> Run:
    argv = ["--job.config_file", file, *options, "--debug.seed", str(seed), "--metrics.log_freq", "1"]
    argv += ["--job.dump_folder", str(out / name.lower())]
    given = load_config(argv)
    if given.checkpoint.enable:  # for weights to begin with: nothing is saved, and no earlier run is gone on with
        argv += ["--checkpoint.load_only", "--checkpoint.no_create_seed_checkpoint"]
        argv += ["--checkpoint.no_last_save_in_hf"]
        argv += ["--checkpoint.folder", "none", "--checkpoint.load_step", "-1"]
    if steps is not None:
        schedule = given.lr_scheduler.total_steps or given.training.steps
        argv += ["--training.steps", str(steps)]
        if steps < schedule:  # the first steps of the run that was meant, not a shorter schedule
            argv += ["--lr_scheduler.total_steps", str(schedule)]
    if world_size is None:
        world_size = infer_world_size(given.parallelism)
    elif world_size < 1:
        raise Refusal(f"--world_size_{name.lower()} = {world_size} is no number of ranks; use 1 or more")
    config = load_config(argv, world_size)
    dims = plan_layout(config.parallelism, world_size)
    return Run(name, file, argv, config, dims, world_size, plan_batch(config.training, dims.dp).global_batch_size)


def train(run: Run) -> list[dict[str, Any]]:
    """Run train.py as the command line would; its records. What it prints goes to its log."""
    print(f"{run}, {run.config.training.steps} steps, log {run.log}", flush=True)
    begin = time.perf_counter()
    with run.log.open("w", encoding="utf-8") as log:
        print(f"$ {shlex.join(run.command)}", file=log, flush=True)
        process = subprocess.Popen(
            run.command, stdout=log, stderr=subprocess.STDOUT, env=environment_here(run.world_size)
        )
        try:
            code = process.wait()
        except KeyboardInterrupt:
            process.terminate()  # torchrun then ends its ranks, which neither Ctrl-C nor its own death would
            process.wait()
            raise
    if code:
        tail = run.log.read_text(encoding="utf-8", errors="replace").splitlines()[-_TAIL_LINES:]
        raise Refusal(
            f"run {run.name} ended with exit code {code}; the end of {run.log}:\n" + "\n".join(f"  {x}" for x in tail)
        )
    print(f"   {time.perf_counter() - begin:.0f} s", flush=True)
    return [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def import_figure() -> Any:
    """The optional package's Figure, or an error with the line that installs it."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        python = shlex.quote(os.path.relpath(sys.executable))
        raise Refusal(f"compare draws its curves with matplotlib; {python} -m pip install matplotlib") from None
    return Figure


def draw(a: Run, b: Run, comparison: Comparison, path: Path) -> None:
    """Both loss curves, and below them the differences against their bounds."""
    floor = 1e-9  # a logarithmic axis has no 0; a float32's last bit is 6e-8
    figure = import_figure()(figsize=(9, 7), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    for run, records, style in [
        (a, comparison.a, {"color": "#9ecae1", "linewidth": 5}),
        (b, comparison.b, {"color": "#08306b", "linewidth": 1.2, "linestyle": "--"}),  # on top of A, both are seen
    ]:
        losses = [math.nan if record["loss"] is None else record["loss"] for record in records]
        top.plot(comparison.loss.steps, losses, label=str(run), **style)
    top.set(ylabel="loss", title=comparison.verdict())
    top.legend()
    for gap, color in [(comparison.loss, "#d95f02"), (comparison.norm, "#1b9e77")]:
        values = [max(floor, value) for value in gap.values]
        bottom.plot(gap.steps, values, ".-", color=color, linewidth=1, label=gap.what)
        bottom.axhline(gap.bound, color=color, linestyle=":", label=f"its bound, {gap.bound:.1e}")
    bottom.set(yscale="log", xlabel="step", ylabel="relative difference\n(less than 1e-9 is drawn as 1e-9)")
    bottom.legend(ncols=2)
    bottom.xaxis.get_major_locator().set_params(integer=True)
    for axes in (top, bottom):
        axes.grid(alpha=0.3)
        axes.set_axisbelow(True)
    figure.savefig(path, dpi=120)


def run(args: argparse.Namespace, options: Sequence[str]) -> int:
    """The verb; exit codes are those of `diff`: 0 alike, 1 different, 2 not compared."""
    try:
        import_figure()
        out = Path(args.out)
        a, b = plan_runs(args, options)
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise Refusal(f"--out = {args.out} cannot be made: {error.strerror}; name another folder") from None
        comparison = compare_records(train(a), train(b), args.loss_bound, args.norm_bound)
    except Refusal as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    text = describe(a, b, comparison)
    (out / "compare.txt").write_text(text, encoding="utf-8")
    draw(a, b, comparison, out / "compare.png")
    print(f"\n{text}\nin {out}: compare.txt, compare.png, the runs a and b")
    return 0 if comparison.alike else 1
