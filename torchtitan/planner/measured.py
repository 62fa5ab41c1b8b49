"""Predicted beside measured: what a plan said of a run, and what the run's records say. No torch."""

import json
from pathlib import Path
from statistics import median
from typing import Any

import tomli

from torchtitan.refusal import Refusal

_FIRST = 3  # steps that compile and warm up; they are left out if more follow
# What the trainer measures as one phase, and the parts of the step that a plan predicts for it; None: all others.
_PHASES = {"forward_backward_seconds": None, "update_seconds": ("optimizer",), "data_seconds": ()}
_LAYOUT = ("parallelism", "activation_checkpoint")


def compare(run: Path, plan: Path) -> list[tuple[str, float, float]]:
    """Name, predicted and measured of the step, its phases and memory. Refuses a run of another layout."""
    said = _read(plan, json.loads)
    planned, ran = _read(plan.with_suffix(".toml"), tomli.loads), _read(run / "config.toml", tomli.loads)
    for name in _LAYOUT:
        for key, value in planned.get(name, {}).items():
            if (found := ran.get(name, {}).get(key)) != value:
                raise Refusal(f"{run} is not a run of {plan}: its {name}.{key} is {found}, the plan's {value}")
    records = [json.loads(line) for line in _read(run / "metrics.jsonl", str.splitlines)]
    steps = [record for record in records if "step_seconds" in record]
    steps = [record for record in steps if record["step"] > _FIRST] or steps
    if not steps:
        raise Refusal(f"{run} has no measured step; train a few, with metrics.log_freq = 1")
    rows = [("step_seconds", float(said["seconds"]), median(record["step_seconds"] for record in steps))]
    named = [part for parts in _PHASES.values() if parts for part in parts]
    for phase, parts in _PHASES.items():
        chosen = [name for name in said["parts"] if name not in named] if parts is None else parts
        predicted = sum(said["parts"][name] for name in chosen)
        rows.append((phase, float(predicted), median(record.get(phase, 0.0) for record in steps)))
    rows.append(("memory_gib", float(said["memory_gib"]), max(record["memory_gib"] for record in steps)))
    return rows


def report(run: Path, plan: Path) -> str:
    """The comparison as a table; the run folder keeps it as plan.json."""
    rows = compare(run, plan)
    kept = {name: {"predicted": predicted, "measured": measured} for name, predicted, measured in rows}
    (run / "plan.json").write_text(json.dumps({"plan": str(plan), **kept}, indent=1) + "\n", encoding="utf-8")
    lines = [f"{'':<26} predicted   measured  error"]
    for name, predicted, measured in rows:
        error = f"{predicted / measured - 1:+7.1%}" if predicted and measured else ""
        lines.append(f"{name:<26} {predicted:9.4f}  {measured:9.4f} {error}".rstrip())
    return "\n".join([*lines, f"{run / 'plan.json'} keeps both"])


def _read(path: Path, parse: Any) -> Any:
    try:
        return parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise Refusal(f"{path} cannot be read: {error}; `plan CONFIG.toml --out PLAN.toml` writes a plan") from None
