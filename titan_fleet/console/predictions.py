"""What the planner said of a run, as it is kept in the run folder, beside what the run recorded."""

import json
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from titan_fleet.console.answers import Prediction
from titan_fleet.console.curves import Curves
from titan_fleet.console.text import inert

BYTES = 2**17
_WARM_UP = 3  # steps that compile, as observe/planned.py leaves them out
_MOST_KEYS = 20


def read_prediction(text: bytes, ran: Mapping[str, Any], curves: Curves) -> Prediction | None:
    """`ran` has the keys of the run's configuration. A file that is no plan gives None."""
    try:
        said = json.loads(text)
        numbers: dict[str, Any] = {name: float(said[name]) for name in ("seconds", "memory_gib")}
        words: dict[str, Any] = {name: inert(str(said[name])[:300].encode()) for name in ("layout", "rests_on")}
        differs = [key for key, value in said["run"].items() if key in ran and ran[key] != value]
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return None
    if not all(0 < number < float("inf") for number in numbers.values()):
        return None
    return Prediction(
        **words,
        **numbers,
        measured_seconds=_middle(curves.line("step_seconds", "step")),
        measured_memory_gib=max((y for _, y in curves.line("memory_gib", "step")), default=None),
        differs=[inert(key[:80].encode()) for key in differs[:_MOST_KEYS]],
    )


def _middle(points: Sequence[tuple[float, float]]) -> float | None:
    """The median without records of the steps that warm up, if others follow."""
    if not points:
        return None
    pairs = zip(points, points[1:], strict=False)
    return median([y for (before, _), (_, y) in pairs if before >= _WARM_UP] or [points[-1][1]])


def in_words(found: Prediction) -> str:
    """What the page says."""
    said = f"Predicted: {found.seconds:.3g} s a step, {found.memory_gib:.3g} GiB ({found.layout}; {found.rests_on})."
    if found.differs:
        return f"{said} The run is not the one that was planned: {', '.join(found.differs)} differ."
    for measured, predicted, unit in (
        (found.measured_seconds, found.seconds, "s a step"),
        (found.measured_memory_gib, found.memory_gib, "GiB"),
    ):
        said += f" Measured: {measured:.3g} {unit}, {measured / predicted:.2f} times that." if measured else ""
    return said
