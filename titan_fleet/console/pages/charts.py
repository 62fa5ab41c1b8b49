"""Line charts: the options of ECharts for curves that may be thinned, smoothed, and drawn on log axes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nicegui import ui

from titan_fleet.console.curves import AXES, smooth, thin

LINES = "#2f6f9f #c1662f #3d8f5f #8a5aa8 #b23a48 #7a7f2a #3a8f97 #a3557f".split()  # readable by day and by night
GREY = "#7d8894"
How = tuple[str, bool, float]  # over what, on a log scale, how smooth
Points = Sequence[tuple[float, float]]


def chart(title: str, large: bool = False) -> ui.echart:
    made = ui.echart({"title": {"text": title}, "series": []}).classes("chart")
    made.props(f'role="img" aria-label="{title}"')
    return made.classes("large") if large else made


def draw(target: ui.echart, title: str, lines: Mapping[str, Points], how: How, most: float | None = None) -> None:
    """Show these curves. Smoothed ones lie above what was measured. With `most`, y goes from 0 to that."""
    axis, log, weight = how
    series: list[dict[str, Any]] = []
    for number, (name, points) in enumerate(lines.items()):
        points = [(x, y) for x, y in points if y > 0] if log else points
        color = LINES[number % len(LINES)]
        if weight and len(points) > 5:
            series.append(_line("", thin(points), color, 0.25))
            points = smooth(points, weight)
        series.append(_line(name, thin(points), color, 1.0))
    target.options.clear()
    target.options.update(_frame(title, axis, log), series=series)
    if most is not None:
        target.options["yAxis"] |= {"min": 0, "max": most}
    if len(lines) > 1:
        names = [one["name"] for one in series if one["name"]]
        legend = {"data": names, "top": 2, "right": 8, "left": 180, "type": "scroll", "textStyle": {"color": GREY}}
        target.options["legend"] = legend
    target.update()


def draw_map(
    target: ui.echart, title: str, names: Sequence[str], values: Sequence[Sequence[float]], best: bool
) -> None:
    """A square for each pair, a row sends to the columns; the darker, the slower. `best`: a large value is fast."""
    points = [[x, y, round(v, 3)] for y, row in enumerate(values) for x, v in enumerate(row) if x != y]
    shown = [point[2] for point in points] or [0]
    colors = ["#7a2e12", "#f3d9c4"] if best else ["#f3d9c4", "#7a2e12"]
    frame = _frame(title, "", False)
    axis = {"type": "category", "data": list(names), "axisLabel": {"color": GREY, "fontSize": 11}}
    scale = {"min": 0, "max": max(shown), "precision": 2, "inRange": {"color": colors}, "calculable": True, "right": 0}
    label = {"show": len(names) <= 12, "textBorderColor": "#fff", "textBorderWidth": 2, "color": "#222"}
    series = {"type": "heatmap", "data": points, "label": label}
    frame |= {"grid": {"left": 90, "right": 90, "top": 36, "bottom": 30}, "visualMap": scale | {"top": "middle"}}
    frame |= {"xAxis": axis, "yAxis": axis | {"inverse": True}, "series": [series]}
    frame["tooltip"] |= {"trigger": "item"}
    target.options.clear()
    target.options.update(frame)
    target.update()


def _frame(title: str, axis: str, log: bool) -> dict[str, Any]:
    grid = {"lineStyle": {"color": GREY, "opacity": 0.18}}
    label = {"color": GREY, "fontSize": 11}
    name = {"name": AXES.get(axis, axis), "nameLocation": "middle", "nameGap": 24, "nameTextStyle": label}
    x = {"type": "value", "axisLabel": label, "splitLine": {"show": False}, "min": "dataMin", "max": "dataMax"}
    return {
        "animation": False,
        "title": {"text": title, "left": 8, "top": 4, "textStyle": {"fontSize": 13, "fontWeight": 600, "color": GREY}},
        "grid": {"left": 56, "right": 18, "top": 36, "bottom": 40},
        "tooltip": {"trigger": "axis", "renderMode": "richText", "confine": True},  # no HTML out of names
        "xAxis": x | name,
        "yAxis": {"type": "log" if log else "value", "scale": True, "axisLabel": label, "splitLine": grid},
    }


def _line(name: str, points: Points, color: str, opacity: float) -> dict[str, Any]:
    look = {"color": color, "opacity": opacity}
    marks = {"showSymbol": len(points) < 40 and opacity == 1.0, "symbolSize": 4}
    hidden = {"silent": opacity < 1.0, "tooltip": {"show": opacity == 1.0}}
    # A text that the page evaluates: of lists, NiceGUI would wrap each point, to watch it for changes.
    data = ",".join(f"[{x:.9g},{y:.6g}]" for x, y in points)
    shown = {"lineStyle": {"width": 1.5} | look, "itemStyle": look}
    return {"type": "line", "name": name, ":data": f"[{data}]"} | shown | marks | hidden


@dataclass
class Controls:
    """How curves are drawn: over what, on which scale, how smooth."""

    axis: ui.select
    log: ui.checkbox
    weight: ui.slider

    def on_change(self, do: Callable[[], Any]) -> None:
        for control in (self.axis, self.log, self.weight):
            control.on_value_change(do)

    def values(self) -> How:
        return str(self.axis.value), bool(self.log.value), float(self.weight.value)


def add_controls() -> Controls:
    axis = ui.select(AXES, value="step", label="Over").style("min-width: 130px")
    log = ui.checkbox("Log scale")
    with ui.element("div").classes("line"):
        ui.label("Smoothing").classes("dim")
        weight = ui.slider(min=0, max=0.98, step=0.02, value=0).props('aria-label="Smoothing"').style("width: 140px")
    return Controls(axis, log, weight)
