"""Draws the losses of a run, as loss.png in the run folder."""

import contextlib
import json
import math
from collections.abc import Sequence
from pathlib import Path

Points = list[tuple[int, float]]  # step, loss

_SIZE, _MARGINS = (900, 540), (70, 30, 30, 50)  # pixels; left, top, right, bottom
_TRAINING, _VALIDATION, _GRID = (31, 97, 160), (205, 92, 20), (225, 225, 225)


def read_losses(file: Path, key: str) -> Points:
    """The finite values of this key; a line that was cut short is left out."""
    points: Points = []
    for line in file.read_text(encoding="utf-8").splitlines() if file.is_file() else []:
        with contextlib.suppress(ValueError):
            if (record := json.loads(line)).get(key) is not None:
                points.append((record["step"], record[key]))
    return points


def draw(folder: Path) -> None:
    """Write loss.png beside the records of this folder if they have two losses, and experts.png if they have loads."""
    training = read_losses(folder / "metrics.jsonl", "loss")
    if len(training) > 1:
        write_png(folder / "loss.png", training, read_losses(folder / "validation.jsonl", "validation_loss"))
    if loads := read_losses(folder / "metrics.jsonl", "expert_load_by_layer"):
        from torchtitan.observe.heat import write_loads

        write_loads(folder / "experts.png", loads, nice_ticks(0, loads[-1][0]))


def write_png(path: Path, training: Points, validation: Points, names: Sequence[str] = ("loss", "validation")) -> None:
    """The first points as a line, the others as dots."""
    from PIL import Image, ImageDraw  # TensorBoard needs it too

    left, top, right, bottom = _MARGINS
    width, height = _SIZE[0] - left - right, _SIZE[1] - top - bottom
    every = [*training, *validation]
    ticks = nice_ticks(min(loss for _, loss in every), max(loss for _, loss in every))
    steps = nice_ticks(0, max(step for step, _ in every))

    def at(step: float, loss: float) -> tuple[float, float]:
        x = left + width * step / steps[-1]
        return x, top + height * (ticks[-1] - loss) / (ticks[-1] - ticks[0])

    image = Image.new("RGB", _SIZE, "white")
    pen = ImageDraw.Draw(image)
    for tick in ticks:
        (x, y), (end, _) = at(0, tick), at(steps[-1], tick)
        pen.line([(x, y), (end, y)], fill=_GRID)
        pen.text((x - 50, y - 6), f"{tick:.6g}", fill="black")
    for tick in steps:
        x, y = at(tick, ticks[0])
        pen.line([(x, top), (x, y)], fill=_GRID)
        pen.text((x - 10, y + 10), f"{tick:,.6g}", fill="black")
    pen.text((left + width - 30, _SIZE[1] - 18), "step", fill="black")
    pen.text((left + 8, 8), names[0], fill=_TRAINING)
    pen.line([at(*point) for point in training], fill=_TRAINING, width=2)
    for point in validation:
        x, y = at(*point)
        pen.ellipse([(x - 4, y - 4), (x + 4, y + 4)], fill=_VALIDATION)
    if validation:
        pen.text((left + 26 + pen.textlength(names[0]), 8), names[1], fill=_VALIDATION)
    image.save(path)


def nice_ticks(low: float, high: float) -> Sequence[float]:
    """Round numbers from at most `low` to at least `high`, about six."""
    span = max(high - low, 1e-6, abs(high) * 1e-6)
    power = 10.0 ** math.floor(math.log10(span / 5))
    size = next(factor * power for factor in (1, 2, 5, 10) if span / (factor * power) <= 6)
    first, last = math.floor(low / size), math.ceil(high / size)
    return [number * size for number in range(first, max(last, first + 1) + 1)]
