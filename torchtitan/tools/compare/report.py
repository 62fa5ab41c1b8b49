"""The result of a comparison: the difference at each step, the verdict, a page of text and a figure."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtitan.config.names import flat, key_names
from torchtitan.observe.curve import write_png
from torchtitan.refusal import Refusal
from torchtitan.tools.compare.runs import ComparedRun

_MOST_ROWS, _MOST_DOTS = 12, 60

# Keys that may differ between two runs whose losses should be equal.
_HOW_SECTIONS = {
    "profiling", "metrics", "parallelism", "checkpoint", "activation_checkpoint", "compile", "comm", "validation"
}  # fmt: skip
_HOW_KEYS = {
    "job.description",
    "job.plan",
    "job.print_config",
    "optimizer.implementation",
    "training.local_batch_size",
    "training.gc_freq",
    "debug.deterministic",
    "debug.deterministic_warn_only",
}


@dataclass(frozen=True)
class Gap:
    """The difference in one number of the two runs at each step, and its bound."""

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
        """Index of the first difference over the bound; every difference is over a bound of NaN."""
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
    """Compare the records of both runs step by step."""
    steps = [record["step"] for record in a]
    if steps != [record["step"] for record in b] or not steps:
        raise Refusal(
            f"A has records of {_describe_steps(a)} and B of {_describe_steps(b)}, so they cannot be compared step by "
            "step; the end of both logs says why (the data ended, the disk was full)"
        )

    def gap(what: str, key: str, bound: float) -> Gap:
        return Gap(what, steps, [_difference(x[key], y[key]) for x, y in zip(a, b, strict=True)], bound)

    return Comparison(a, b, gap("loss", "loss", loss_bound), gap("gradient norm", "grad_norm", norm_bound))


def _difference(a: float | None, b: float | None) -> float:
    """Relative to the larger of the two. A value that is not finite (None in a record) equals only another such."""
    if a is None or b is None:
        return 0.0 if a is b else math.inf
    return 0.0 if a == b else abs(a - b) / max(abs(a), abs(b))


def _describe_steps(records: list[dict[str, Any]]) -> str:
    return f"{len(records)} steps up to {records[-1]['step']}" if records else "no step"


def _value(dotted: dict[str, Any], name: str) -> Any:
    """The value of a key; a key that is a table has its values below it."""
    if name in dotted:
        return dotted[name]
    return {key: value for key, value in dotted.items() if key.startswith(f"{name}.")}


def differing_keys(a: ComparedRun, b: ComparedRun) -> tuple[list[str], list[str]]:
    """A line for each key that differs, in two lists: keys that set how to compute, and keys that set what to train."""
    how: list[str] = []
    what: list[str] = []
    values = [flat(run.config.model_dump()) for run in (a, b)]
    for run, dotted in zip((a, b), values, strict=True):  # compare -1 by the number it resolves to
        dotted["training.global_batch_size"] = run.global_batch_size
        if dotted["training.num_streams"] == -1:
            dotted["training.num_streams"] = run.global_batch_size
    for name in key_names():
        section = name.partition(".")[0]
        x, y = (_value(dotted, name) for dotted in values)
        if x != y and name not in ("job.config_file", "job.dump_folder"):
            line = f"{name}: A {json.dumps(x)}, B {json.dumps(y)}"
            is_how = section in _HOW_SECTIONS and not name.startswith(("checkpoint.initial_load", "checkpoint.exclude"))
            (how if is_how or name in _HOW_KEYS else what).append(line)
    return how, what


def describe(a: ComparedRun, b: ComparedRun, comparison: Comparison) -> str:
    """The whole result as text."""
    how, what = differing_keys(a, b)
    seq_len = a.config.training.seq_len
    lines = [str(a), str(b)]
    lines += [f"{len(comparison.a)} steps, global batch {a.global_batch_size} x {seq_len} tokens"]
    lines[-1] += f", seed {a.config.debug.seed} for both"
    for differing, meaning in (
        (how, "how to compute, which should not change the loss"),
        (what, "what to train, so the losses are expected to differ"),
    ):
        if differing:
            lines += ["", f"keys that differ and set {meaning}:", *(f"  {line}" for line in differing)]
    lines += ["", *_table(comparison), "", "largest relative difference:"]
    for gap in (comparison.loss, comparison.norm):
        lines += [f"  {gap.what + ':':14} {gap.describe_largest()}"]
    return "\n".join([*lines, "", comparison.verdict(), ""])


def _table(comparison: Comparison) -> list[str]:
    """One row per step; of a long run only some steps, the largest differences and the first ones over a bound."""
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


def draw(comparison: Comparison, path: Path) -> None:
    """Draw the losses of A as a line, and those of B as dots: of a long run only some."""
    a, b = (
        [(record["step"], record["loss"]) for record in records if record["loss"] is not None]
        for records in (comparison.a, comparison.b)
    )
    if a and b:
        write_png(path, a, b[:: 1 + len(b) // _MOST_DOTS], names=("loss of A", "loss of B"))
