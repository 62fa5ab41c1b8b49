"""Draws as SVG a site's run over time (when it trained, waited, when each fragment travelled), and losses."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

from torchtitan.observe.curve import nice_ticks

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


def draw_losses(file: Path, title: str, below: str, lines: Mapping[str, Sequence[tuple[float, float]]]) -> None:
    """A line each; one that ends early goes on dashed, at what it reached."""
    points = [point for line in lines.values() for point in line]
    xs, ys = nice_ticks(0, max(x for x, _ in points)), nice_ticks(min(y for _, y in points), max(y for _, y in points))
    width, height = 560, 280

    def place(x: float, y: float) -> str:
        return f"{60 + width * x / xs[-1]:.1f},{TOP + height * (ys[-1] - y) / (ys[-1] - ys[0]):.1f}"

    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 780 370" font-family="sans-serif" font-size="12">',
        f'<rect width="100%" height="100%" fill="white"/><text x="60" y="22" font-size="14">{escape(title)}</text>',
        f'<text x="{60 + width / 2:.0f}" y="{TOP + height + 40}" text-anchor="middle">{escape(below)}</text>',
    ]
    for tick in ys:
        y = place(0, tick).split(",")[1]
        parts.append(f'<line x1="60" x2="{60 + width}" y1="{y}" y2="{y}" stroke="#ddd"/>')
        parts.append(f'<text x="52" y="{y}" dy="4" text-anchor="end">{tick:.6g}</text>')
    for tick in xs:
        x = place(tick, ys[0]).split(",")[0]
        parts.append(f'<text x="{x}" y="{TOP + height + 18}" text-anchor="middle">{tick:.6g}</text>')
    colors, beneath = dict(zip(lines, (WAITING, "#555555", TRAVELLING), strict=True)), 0.0
    for name, line in sorted(lines.items(), key=lambda item: -item[1][-1][1]):
        last, value = line[-1]
        curve = " ".join(place(*point) for point in line)
        (x, y), end = place(last, value).split(","), place(max(x for x, _ in points), value).split(",")[0]
        parts.append(f'<polyline points="{curve}" fill="none" stroke="{colors[name]}" stroke-width="2"/>')
        parts.append(f'<line x1="{x}" x2="{end}" y1="{y}" y2="{y}" stroke="{colors[name]}" stroke-dasharray="4 4"/>')
        beneath = max(float(y), beneath + 15)  # names of lines that end close together
        place_of_name = f'x="{end}" y="{beneath:.1f}" dx="8" dy="4" fill="{colors[name]}"'
        parts.append(f"<text {place_of_name}>{escape(name)} {value:.3f}</text>")
    file.write_text("\n".join([*parts, "</svg>"]) + "\n", encoding="utf-8")
