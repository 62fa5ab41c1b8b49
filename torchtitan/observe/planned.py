"""Predicted beside measured: what a plan said of a run, and what the run's records say. No torch.

A run whose file names a plan (`job.plan`) logs the comparison at its end; `plan measured` makes it later.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from torchtitan.config.names import flat
from torchtitan.config.schema import Config
from torchtitan.refusal import Refusal

FILE = "plan_measured.json"  # in the run folder
_WARM_UP = 3  # steps of a process that compile and warm up; they are left out if more follow
# What the trainer measures as one phase, and the parts of the step that a plan predicts for it; None: all others.
_PHASES = {"forward_backward_seconds": None, "update_seconds": ("optimizer",), "data_seconds": ()}
_SECTIONS = ("model", "parallelism", "activation_checkpoint", "compile", "float8")
_TRAINING = ("local_batch_size", "global_batch_size", "seq_len", "mixed_precision_param")
_KEYS = ("optimizer.name", *(f"training.{key}" for key in _TRAINING))
Row = tuple[str, float, float]  # name, predicted, measured


def described(values: Mapping[str, Any]) -> dict[str, Any]:
    """Of a configuration by tables: the keys that a prediction is about, by dotted name."""
    keys = flat(dict(values)).items()
    return {
        key: value
        for key, value in keys
        if value is not None and (key in _KEYS or key.partition(".")[0] in _SECTIONS) and key != "model.hf_assets_path"
    }


def report_run(config: Config, folder: Path, begun: int) -> str:
    """At the end of a run: the comparison of the steps that this process trained, or why there is none."""
    assert config.job.plan is not None
    beside = Path(config.job.config_file or "").parent / config.job.plan
    try:
        # A run that goes on from its own folder's config.toml finds what it kept there.
        plan = folder / FILE if not beside.is_file() and (folder / FILE).is_file() else beside
        return report(folder, plan, config.model_dump(), begun)
    except (Refusal, OSError) as error:
        return f"no comparison with the plan: {error}"


def report(folder: Path, plan: Path, ran: Mapping[str, Any], begun: int = 0) -> str:
    """Predicted beside measured as a table; plan_measured.json in the run folder keeps both."""
    said, measured = read_plan(plan), read_steps(folder, begun)
    if changes := differences(said["run"], described(ran)):
        more = f", and {len(changes) - 3} more" if len(changes) > 3 else ""
        raise Refusal(f"{folder} is not a run of {plan}: {'; '.join(changes[:3])}{more}")
    rows = compare(said, measured)
    kept = {name: {"predicted": predicted, "measured": measured} for name, predicted, measured in rows}
    (folder / FILE).write_text(json.dumps(said | {"measured": kept}, indent=1) + "\n", encoding="utf-8")
    lines = [f"{'':<36} predicted   measured  error"]
    for name, predicted, found in rows:
        error = f"{predicted / found - 1:+7.1%}" if predicted and found else ""
        lines.append(f"{name:<36} {predicted:9.4f}  {found:9.4f} {error}".rstrip())
        if name == "forward_backward_seconds":
            lines += [f"  {part:<34} {seconds:9.4f}" for part, seconds in said["parts"].items() if part != "optimizer"]
    return "\n".join([*lines, f"{folder / FILE} keeps both; the prediction rests on {said['rests_on']}"])


def compare(said: Mapping[str, Any], steps: Sequence[Mapping[str, float]]) -> list[Row]:
    """Name, predicted and measured of the step, its phases and memory; a median of steps is not moved by a slow one."""
    parts, named = said["parts"], [part for parts in _PHASES.values() if parts for part in parts]
    rows = [("step_seconds", float(said["seconds"]), median(record["step_seconds"] for record in steps))]
    for phase, of_phase in _PHASES.items():
        chosen = [name for name in parts if name not in named] if of_phase is None else of_phase
        predicted = float(sum(parts.get(name, 0.0) for name in chosen))
        rows.append((phase, predicted, median(record.get(phase, 0.0) for record in steps)))
    return [*rows, ("memory_gib", float(said["memory_gib"]), max(record["memory_gib"] for record in steps))]


def differences(planned: Mapping[str, Any], ran: Mapping[str, Any]) -> list[str]:
    """The keys in which a run differs from its plan."""
    return [
        f"{key} is {ran.get(key, 'absent')}, the plan's {planned.get(key, 'absent')}"
        for key in sorted(planned.keys() | ran.keys())
        if planned.get(key) != ran.get(key)
    ]


def read_plan(path: Path) -> dict[str, Any]:
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
        assert isinstance(said["run"], dict) and isinstance(said["parts"], dict) and said["seconds"] > 0
    except (OSError, ValueError, KeyError, TypeError, AssertionError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no plan"
        raise Refusal(f"{path} cannot be read: {why}; `plan CONFIG.toml --out PLAN.toml` writes one") from None
    return dict(said)


def read_steps(folder: Path, begun: int = 0) -> list[dict[str, float]]:
    """The records of steps after `begun`, without those that warm up if others follow."""
    try:
        lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        records = [json.loads(line) for line in lines]
    except (OSError, ValueError) as error:
        raise Refusal(f"{folder / 'metrics.jsonl'} cannot be read: {error}; name a run folder") from None
    steps = [record for record in records if record["step"] > begun and "step_seconds" in record]
    if not steps:
        raise Refusal(f"{folder} has no measured step after step {begun}; train a few")
    # A record is about the steps since the one before it.
    ends = [begun, *(record["step"] for record in steps)]
    return [record for end, record in zip(ends, steps, strict=False) if end >= begun + _WARM_UP] or steps[-1:]
