"""Runs beside each other: their curves in one chart, and the keys in which their configurations differ."""

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeVar

from nicegui import ui

from titan_fleet.console.answers import Run
from titan_fleet.console.library import Library, keys_of
from titan_fleet.console.pages.charts import Points, add_controls, chart, draw
from titan_fleet.console.pages.frame import Parts, framed, heading, look, table
from torchtitan.refusal import Refusal

T = TypeVar("T")
_MOST = 8
_SECONDS = 2


def add(parts: Parts) -> None:
    @ui.page("/compare", dark=None)
    def compare(runs: str = "") -> None:
        known = labels(parts.library.runs())
        chosen = [id for id in dict.fromkeys(runs.split(",")) if id in known][:_MOST]
        with framed("Compare"):
            with ui.element("div").classes("line"):
                heading("Compare")
                ui.element("div").classes("grow")
                which = ui.select(known, value=chosen, multiple=True, label="Runs").props("use-chips")
                which.style("min-width: 260px; max-width: 620px")
                name = ui.select(["loss"], value="loss", label="Curve").style("min-width: 160px")
                controls = add_controls()
            picture = chart("loss", large=True)
            heading("Keys that differ", 2)
            holder = ui.element("div")

        async def curves() -> None:
            found = await look(_lines, parts.library, list(which.value)[:_MOST], name.value, controls.values()[0])
            if found is None:
                return
            names, lines = found
            if names and name.options != names:
                name.set_options(names, value=name.value if name.value in names else names[0])
            labels = {known[id]: points for id, points in lines.items()}
            draw(picture, str(name.value), labels, controls.values())

        async def keys() -> None:
            ids = list(which.value)[:_MOST]
            rows = await look(differences, parts.library, ids) or []
            holder.clear()
            with holder:
                columns = [("key", "Key"), *((id, known[id]) for id in ids)]
                table(columns, "key", pagination={"rowsPerPage": 0}).rows = rows

        async def changed() -> None:
            await curves()
            await keys()

        which.on_value_change(changed)
        name.on_value_change(curves)
        controls.on_change(curves)
        ui.timer(0.1, changed, once=True)
        ui.timer(_SECONDS * 5, curves)


def labels(runs: Sequence[Run]) -> dict[str, str]:
    """Each run's own: a watched run is named by its last folder, so names may repeat."""
    plain = {run.id: f"{run.name} ({run.node})" for run in runs}
    times = Counter(plain.values())
    return {id: label if times[label] == 1 else f"{label} {id[-6:]}" for id, label in plain.items()}


def _readable(read: Callable[[str], T], ids: list[str]) -> dict[str, T]:
    """Without the runs of a node that is away."""
    found = {}
    for id in ids:
        with suppress(Refusal, OSError):
            found[id] = read(id)
    return found


def _lines(library: Library, ids: list[str], name: str, axis: str) -> tuple[list[str], dict[str, Points]]:
    all_curves = _readable(library.curves, ids)
    names = list(dict.fromkeys(name for curves in all_curves.values() for name in curves.names()))
    return names, {id: curves.line(name, axis) for id, curves in all_curves.items()}


def differences(library: Library, ids: list[str]) -> list[dict[str, str]]:
    """A row for each key that is not the same in all."""
    keys = {id: keys_of(text) for id, text in _readable(library.configuration, ids).items()}
    names = sorted({name for values in keys.values() for name in values})
    rows = [{"key": name, **{id: values.get(name, "absent") for id, values in keys.items()}} for name in names]
    return [row for row in rows if len({row[id] for id in keys}) > 1]
