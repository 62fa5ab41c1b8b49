"""One run: live curves, the log of each rank, files and checkpoints, its configuration."""

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from nicegui import ui

from titan_fleet.console.answers import Run
from titan_fleet.console.curves import Curves
from titan_fleet.console.door.people import Person
from titan_fleet.console.library import Unknown, keys_of
from titan_fleet.console.pages.charts import Points, add_controls, chart, draw
from titan_fleet.console.pages.files import add_files, add_log
from titan_fleet.console.pages.frame import (
    Parts,
    confirmed,
    do,
    filter_field,
    framed,
    heading,
    live,
    look,
    moment,
    size,
    table,
)
from titan_fleet.console.pages.hang import add_hang
from titan_fleet.console.pages.meetings import add_meetings
from titan_fleet.console.pages.runs import edit_tags
from titan_fleet.console.predictions import in_words

_SECONDS, _CHART_SECONDS = 0.25, 1  # charts are large, and sent whole:
_POINTS, _LATEST_SECONDS = 400, 5  # a new point that moves one by less than a dot waits for so long
_CHARTS = {  # title -> the curves in it
    "Loss": ("loss", "validation_loss"),
    "Tokens per second": ("tokens_per_second",),
    "Gradient norm": ("grad_norm",),
    "Learning rate": ("lr",),
    "Seconds per step": ("step_seconds", "data_seconds"),
    "Memory, GiB": ("memory_gib",),
}
_PREDICTED = {"Seconds per step": "seconds", "Memory, GiB": "memory_gib"}


def add(parts: Parts) -> None:
    views = {"Curves": _add_curves, "Log": add_log, "Samples": _add_samples, "Files": add_files}
    views["Configuration"] = _add_configuration

    @ui.page("/run/{id}", dark=None)
    def one_run(id: str) -> None:
        try:
            run = parts.library.find(id).page
        except Unknown:
            with framed("Run"):
                ui.label("There is no such run.").classes("trouble")
                ui.link("All runs", "/")
                ui.timer(1, lambda: _load_again_if_known(parts, id))  # a console hears late of the runs of nodes
            return
        with framed(run.name) as person:
            _add_head(parts, person, run)
            banner = ui.label()
            with ui.tabs().props("dense align=left no-caps inline-label narrow-indicator") as tabs:
                for name in views:
                    ui.tab(name)
                meetings, hang = ui.tab("Meetings"), ui.tab("Hang")
            begins = "Log" if run.state in ("failed", "lost") and not run.step else "Curves"
            with ui.tab_panels(tabs, value=begins).props("keep-alive").classes("w-full"):
                for name, add_view in views.items():
                    with ui.tab_panel(name):
                        add_view(parts, id)
                with ui.tab_panel(meetings):
                    add_meetings(parts, id, meetings)
                with ui.tab_panel(hang):
                    add_hang(parts, id, hang, banner)


def _load_again_if_known(parts: Parts, id: str) -> None:
    with suppress(Unknown):
        parts.library.find(id)
        ui.navigate.reload()


def _add_head(parts: Parts, person: Person, run: Run) -> None:
    with ui.element("div").classes("line"):
        heading(run.name)
        state = ui.label().classes("state")
        ui.element("div").classes("grow")
        show_buttons = _add_buttons(parts, person, run)
    facts = ui.element("div").classes("facts number")
    ui.label(run.folder).classes("dim small mono").style("overflow-wrap: anywhere")
    shown: list[Any] = [None]

    def show() -> None:
        try:
            now = parts.library.find(run.id).page
        except Unknown:
            state.text, shown[0] = "deleted", None
            return
        if shown[0] == now:
            return
        shown[0] = now
        show_buttons(now)
        state.text = now.state
        state.classes(replace=f"state {now.state}")
        facts.clear()
        with facts:
            for name, value in _facts(now):
                with ui.element("div"):
                    ui.label(name)
                    ui.label(value)

    show()
    ui.timer(_SECONDS, show)


def _add_buttons(parts: Parts, person: Person, run: Run) -> Callable[[Run], None]:
    """What a person may do to the run; returns what shows the buttons that fit its state."""
    if person.may("operator"):
        ui.button("Tags", on_click=lambda: edit_tags(parts, person, [run.id])).props("outline")
        ui.button("Clone", on_click=lambda: ui.navigate.to(f"/new?source={run.id}")).props("outline")
    resume = ui.button("Resume").props("outline")
    stop = ui.button("Stop").props("outline color=negative")
    delete = ui.button("Delete").props("outline color=negative")

    def show(now: Run) -> None:
        is_live, is_operators = now.state == "running", now.is_own and person.may("operator")
        stop.visible = is_live and is_operators
        delete.visible = not is_live and now.is_own and person.may("admin")
        resume.visible = False
        if is_operators and now.state in ("stopped", "failed", "lost"):
            ui.timer(0.1, offer, once=True)

    async def offer() -> None:
        page = await look(parts.library.page, run.id)
        resume.visible = bool(page and page.checkpoints)

    async def go_on() -> None:
        resume.disable()
        ui.notify("Checking the configuration and starting")
        await do(parts.actions.resume, person, run.id)
        resume.enable()

    async def end() -> None:
        if await confirmed(f"Stop {run.name}? It saves first if it is set up to, and can be resumed.", "Stop"):
            ui.notify("Asking the run to end")
            await do(parts.actions.stop, person, run.id)

    async def remove() -> None:
        files, _ = await look(lambda: parts.library.find(run.id).place.files()) or ((), 0)
        frees = size(sum(file.size for file in files))
        if await confirmed(f"Delete {run.name} with its {frees}? This cannot be undone.", "Delete"):
            done = await do(parts.actions.delete, person, run.id)
            if done is not None:
                ui.notify(f"{size(done.freed_bytes or 0)} are free again")
                ui.navigate.to("/")

    resume.on_click(go_on)
    stop.on_click(end)
    delete.on_click(remove)
    return show


def _facts(run: Run) -> list[tuple[str, str]]:
    exit_code = "" if run.exit_code is None else str(run.exit_code)
    times = (("Started", run.started), ("Ended", run.ended), ("Node away since", run.away_since))
    found = [
        ("Model", run.model or ""),
        ("Cannot be read", run.trouble),
        ("Step", f"{run.step or 0:,} of {run.steps:,}" if run.steps else "none yet"),
        ("Loss", f"{run.loss:.4f}" if run.loss is not None else ""),
        ("Tokens per second", f"{run.tokens_per_second:,.0f}" if run.tokens_per_second is not None else ""),
        *((name, moment(when)) for name, when in times if when),
        ("Exit code", exit_code),
        ("Node", run.node + (f", {run.rank} of {run.nodes}" if run.nodes and run.nodes > 1 else "")),
        ("Tags", ", ".join(run.tags)),
        ("Description", run.description),
    ]
    return [(name, value) for name, value in found if value]


def _add_curves(parts: Parts, id: str) -> None:
    with ui.element("div").classes("line").style("margin-bottom: 10px"):
        controls = add_controls()
    nothing, predicted = ui.label("No step is recorded yet.").classes("dim"), ui.label()
    with ui.element("div").classes("charts") as place:
        pictures = {title: chart(title) for title in _CHARTS}
    seen: list[Any] = [None, 0, 0.0]  # what was drawn, of how many steps, and when

    async def show(asked: bool = True) -> None:
        curves = await look(parts.library.curves, id)
        if curves is None:
            return
        length, clock = len(curves.training.steps), time.monotonic()
        now = (length, len(curves.validation.steps), curves.training.steps[-1:], controls.values())
        moves = (length - seen[1]) * _POINTS >= length or clock > seen[2] + _LATEST_SECONDS
        if now == seen[0] or not (asked or moves):
            return
        seen[:] = now, length, clock
        nothing.visible = not length
        prediction = await look(parts.library.prediction, id)
        predicted.text = in_words(prediction) if prediction else ""
        own = {name.replace("_", " ").capitalize(): (name,) for name in curves.metrics()}
        for title, names in (_CHARTS | own).items():
            if title not in pictures:
                with place:
                    pictures[title] = chart(title)
            lines = _lines(curves, names, controls.values()[0])
            if lines and prediction and not prediction.differs and title in _PREDICTED:
                ends = [point[0] for points in lines.values() for point in (points[0], points[-1])]
                level = getattr(prediction, _PREDICTED[title])
                lines["predicted"] = [(min(ends), level), (max(ends), level)]
            pictures[title].visible = bool(lines)
            if lines:
                draw(pictures[title], title, lines, controls.values())

    controls.on_change(show)
    ui.timer(_CHART_SECONDS, lambda: show(asked=False))


def _lines(curves: Curves, names: tuple[str, ...], axis: str) -> dict[str, Points]:
    lines = {name.replace("_", " "): curves.line(name, axis) for name in names}
    return {name: points for name, points in lines.items() if points}


def _add_samples(parts: Parts, id: str) -> None:
    """Texts at steps; a run writes them where metrics.sample_freq asks for them."""
    holder = ui.element("div").classes("facts-list")

    def show(samples: list[tuple[int, str]]) -> None:
        holder.clear()
        with holder:
            if not samples:
                ui.label("No sample is in the log; metrics.sample_freq and sample_prompt ask for some.").classes("dim")
            for step, text in samples[:50]:
                ui.label(f"Step {step:,}").classes("dim small")
                ui.label(text).classes("sample mono")

    live(lambda: parts.library.samples(id), show, _CHART_SECONDS * 5)


def _add_configuration(parts: Parts, id: str) -> None:
    with ui.element("div").classes("line"):
        wanted = filter_field("keys")
    shown = table([("key", "Key"), ("value", "Value")], "key", pagination={"rowsPerPage": 0})
    shown.bind_filter_from(wanted, "value").style("margin-top: 10px")

    def show(text: str) -> None:
        shown.rows = [{"key": key, "value": value} for key, value in keys_of(text).items()]

    live(lambda: parts.library.configuration(id), show, _CHART_SECONDS * 5)
