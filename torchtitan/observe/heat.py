"""Draws the load of the experts, as experts.png in the run folder: a row for each layer that has some, over steps."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

_WIDTH, _LEFT, _TOP, _RIGHT = 800, 70, 40, 30  # pixels
_EVEN, _UNEVEN, _HIGHEST = (245, 245, 245), (150, 20, 20), 4.0  # the colours of a load of 1, and of this or more


def write_loads(path: Path, loads: Sequence[tuple[int, Any]], steps: Sequence[float]) -> None:
    """Of steps, and each layer's largest load over the mean one; where some share a pixel, their largest shows.

    The axis has marks at `steps`.
    """
    from PIL import Image, ImageDraw  # TensorBoard needs it too

    columns: dict[int, list[float]] = {}
    for step, load in loads:
        x = round(_WIDTH * step / steps[-1])
        columns[x] = [max(pair) for pair in zip(load, columns.get(x, load), strict=True)]
    row = max(4, min(24, 480 // len(loads[0][1])))
    bottom = _TOP + row * len(loads[0][1])
    image = Image.new("RGB", (_LEFT + _WIDTH + _RIGHT, bottom + 50), "white")
    pen = ImageDraw.Draw(image)
    begin = 0
    for end, load in sorted(columns.items()):
        for number, value in enumerate(load):
            y = _TOP + row * number
            pen.rectangle([(_LEFT + begin, y), (_LEFT + max(begin, end - 1), y + row - 1)], fill=_color(value))
        begin = end
    for number in range(0, len(loads[0][1]), -(-12 // row)):  # text is 12 pixels high
        pen.text((40, _TOP + row * number + (row - 12) / 2), str(number), fill="black")
    for tick in steps:
        pen.text((_LEFT + _WIDTH * tick / steps[-1] - 10, bottom + 8), f"{tick:,.6g}", fill="black")
    pen.text((_LEFT + _WIDTH - 30, bottom + 26), "step", fill="black")
    pen.text((12, 14), "layers with experts; largest load over the mean one:", fill="black")
    for number in range(7):
        value, x = 1 + number * (_HIGHEST - 1) / 6, _LEFT + 290 + 48 * number
        pen.rectangle([(x, 14), (x + 14, 26)], fill=_color(value), outline="black")
        pen.text((x + 19, 14), f"{value:g}" + "+" * (number == 6), fill="black")
    image.save(path)


def _color(load: float) -> tuple[int, ...]:
    share = min(1.0, max(0.0, (load - 1) / (_HIGHEST - 1)))
    return tuple(round(a + (b - a) * share) for a, b in zip(_EVEN, _UNEVEN, strict=True))
