"""Draws a site's run over time, as SVG: when it trained, when each fragment travelled, when the site waited for one."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

WIDTH, LANE, LEFT, TOP = 1000, 22, 110, 40
TRAINING, TRAVELLING, WAITING = "#7fb77e", "#6f9ed8", "#d96c5f"


class Trip(NamedTuple):
    fragment: int
    begin: float  # seconds since the run began here
    seconds: float
    waited: float  # of them, at the end, with training standing still
    what: str


def draw(file: Path, title: str, num_fragments: int, trips: Sequence[Trip], total: float) -> None:
    scale = (WIDTH - LEFT - 20) / max(total, 1e-9)
    height = TOP + LANE * (num_fragments + 1) + 30
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" '
        'font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="8" y="18">{escape(title)}</text>',
    ]

    def bar(lane: int, begin: float, seconds: float, color: str, what: str) -> None:
        x, y = LEFT + begin * scale, TOP + lane * LANE
        size = f'width="{max(1.0, seconds * scale):.1f}" height="{LANE - 6}"'
        lines.append(f'<rect x="{x:.1f}" y="{y}" {size} fill="{color}"><title>{escape(what)}</title></rect>')

    for lane, name in enumerate(["training", *(f"fragment {number}" for number in range(num_fragments))]):
        lines.append(f'<text x="8" y="{TOP + lane * LANE + 12}">{name}</text>')
    bar(0, 0.0, total, TRAINING, "training")
    for trip in trips:
        end = trip.begin + trip.seconds
        bar(1 + trip.fragment, trip.begin, trip.seconds - trip.waited, TRAVELLING, trip.what)
        if trip.waited * scale >= 0.5:
            for lane in (0, 1 + trip.fragment):
                bar(lane, end - trip.waited, trip.waited, WAITING, f"waited {trip.waited:.1f} s: {trip.what}")
    for tenth in range(0, 11, 2):
        x, y = LEFT + (WIDTH - LEFT - 20) * tenth / 10, TOP + LANE * (num_fragments + 1)
        lines.append(f'<text x="{x:.0f}" y="{y + 14}" text-anchor="middle">{total * tenth / 10:.0f} s</text>')
    legend = (("training", TRAINING), ("travelling", TRAVELLING), ("waiting", WAITING))
    for number, (name, color) in enumerate(legend):
        x = WIDTH - 300 + 95 * number
        lines.append(
            f'<rect x="{x}" y="9" width="10" height="10" fill="{color}"/><text x="{x + 14}" y="18">{name}</text>'
        )
    file.write_text("\n".join([*lines, "</svg>"]) + "\n", encoding="utf-8")
