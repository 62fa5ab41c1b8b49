"""Draws the losses of a run as text, for a terminal."""

import itertools
from pathlib import Path

from torchtitan.observe.curve import Points, read_losses


def draw_text(folder: Path) -> str:
    """The curve of the records in this folder, "" for fewer than two losses."""
    training = read_losses(folder / "metrics.jsonl", "loss")
    return as_text(training) if len(training) > 1 else ""


def as_text(points: Points, width: int = 72, height: int = 10) -> str:
    """A curve of half blocks with its scale; a column shows the mean of its steps, or lies between its neighbours."""
    first, last = points[0][0], points[-1][0]
    columns: list[list[float]] = [[] for _ in range(width)]
    for step, loss in points:
        columns[min(width - 1, (step - first) * width // max(1, last - first))].append(loss)
    known = {x: sum(column) / len(column) for x, column in enumerate(columns) if column}
    means: list[float] = []
    for (begin, a), (end, b) in itertools.pairwise(known.items()):
        means += [a + (b - a) * (x - begin) / (end - begin) for x in range(begin, end)]
    means += [known[width - 1]]
    low, high = min(means), max(means)
    rows = [[" "] * width for _ in range(height)]
    for x, mean in enumerate(means):
        level = round((high - mean) / ((high - low) or 1.0) * (2 * height - 1))
        rows[level // 2][x] = "▄" if level % 2 else "▀"
    labels = {0: f"{high:.3f}", height - 1: f"{low:.3f}"}
    lines = [f"{labels.get(y, ''):>9} ┤{''.join(row).rstrip()}" for y, row in enumerate(rows)]
    return "\n".join([*lines, f"{'loss':>9} └{'─' * width}", f"{'':11}{f'step {first}':<{width - 10}}{last:>10}"])
