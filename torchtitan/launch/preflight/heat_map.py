"""Draws the speeds between nodes as an SVG: a square for each pair, the darker the slower."""

from collections.abc import Mapping
from typing import Any
from xml.sax.saxutils import escape

from torchtitan.launch.preflight.report import speeds_of

_EDGE, _MARGIN, _MOST_NAMED = 24, 60, 64  # pixels, pixels, nodes


def draw(report: Mapping[str, Any]) -> str:
    """A row sends to the columns. Hover over a square for its figures."""
    speeds = speeds_of(report)
    fastest, count = max(speeds.values(), default=1.0), len(report["nodes"])
    size = _MARGIN + _EDGE * count + 10
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{size}" height="{size}" font-family="sans-serif">',
        f'<text x="4" y="14" font-size="12">Gbit/s, up to {fastest:.2f}; a row sends to the columns</text>',
    ]
    for node in range(count if count <= _MOST_NAMED else 0):
        middle = _MARGIN + _EDGE * node + _EDGE // 2
        lines.append(f'<text x="{middle - 5}" y="{_MARGIN - 8}" font-size="11">{node}</text>')
        lines.append(f'<text x="{_MARGIN - 24}" y="{middle + 4}" font-size="11">{node}</text>')
    for (sender, receiver), speed in sorted(speeds.items()):
        light = round(25 + 70 * speed / fastest)
        x, y = _MARGIN + _EDGE * receiver, _MARGIN + _EDGE * sender
        names = escape(f"{report['nodes'][sender]['host']} to {report['nodes'][receiver]['host']}: {speed:.2f} Gbit/s")
        lines.append(
            f'<rect x="{x}" y="{y}" width="{_EDGE - 1}" height="{_EDGE - 1}" fill="hsl(15 80% {light}%)">'
            f"<title>{names}</title></rect>"
        )
    return "\n".join([*lines, "</svg>\n"])
