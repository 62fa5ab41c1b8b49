"""Every run in a table, live: filter, sort, choose some to compare; and the button that trains the debug model."""

from typing import Any

from nicegui import ui

from titan_fleet.console.answers import Run, TagRun
from titan_fleet.console.door.people import Person
from titan_fleet.console.nodes import HERE
from titan_fleet.console.pages.frame import (
    LINK,
    STATE,
    Parts,
    asking,
    choose,
    do,
    filter_field,
    framed,
    heading,
    moment,
    size,
    table,
)
from titan_fleet.node.messages import ValidationError
from torchtitan.refusal import Refusal

_SECONDS = 0.05  # between looks whether the list has changed, which cost nothing
_COLUMNS = [
    ("name", "Run"),
    ("model", "Model"),
    ("state", "State"),
    ("progress", "Step"),
    ("loss", "Loss"),
    ("speed", "Tokens/s"),
]
_COLUMNS += [("started", "Started"), ("tags", "Tags"), ("node", "Node"), ("description", "Description")]
_NUMBERS = ("progress", "loss", "speed")
_FORMATS = {
    "progress": "(v, {steps: of}) => of && v !== null ? `${v.toLocaleString('en')}/${of.toLocaleString('en')}` : ''",
    "loss": "v => v === null ? '' : v.toFixed(4)",
    "speed": "v => v === null ? '' : Math.round(v).toLocaleString('en')",
}


def add(parts: Parts) -> None:
    @ui.page("/", dark=None)
    def runs() -> None:
        with framed("Runs") as person:
            shown: ui.table
            machine = ui.label().classes("dim small")
            with ui.element("div").classes("line"):
                heading("Runs")
                wanted = filter_field("runs")
                tags = ui.select([], multiple=True, value=[], label="Tags").props("clearable use-chips")
                tags.style("min-width: 130px")
                ui.element("div").classes("grow")
                if person.may("operator"):
                    label = ui.button("Tag").props("outline")
                overlay = ui.button("Compare").props("outline")
                overlay.on_click(
                    lambda: ui.navigate.to("/compare?runs=" + ",".join(row["id"] for row in shown.selected))
                )
                if person.may("operator"):
                    train = ui.button("Train the debug model").props("unelevated")
            shown = table(_COLUMNS, "id", _NUMBERS, _FORMATS, selection="multiple", pagination={"rowsPerPage": 50})
            shown.add_slot("body-cell-name", LINK)
            shown.add_slot("body-cell-state", STATE)
            shown.props('no-data-label="No run yet"').bind_filter_from(wanted, "value")
            overlay.bind_enabled_from(shown, "selected", lambda selected: 2 <= len(selected) <= 8)

        async def start() -> None:
            train.disable()
            ui.notify("Sending the code and checking the configuration")
            started = await do(parts.actions.start_debug_model, person)
            train.enable()
            if started is not None:
                ui.navigate.to(f"/run/{started.id}")

        seen = [-1]

        def show() -> None:
            if seen[0] != parts.library.version:
                seen[0] = parts.library.version
                tags.set_options(known := known_tags(parts))
                tags.visible = bool(known)
                shown.rows = [row(run) for run in parts.library.runs(tags.value or [])]
                now = {one["id"] for one in shown.rows}
                shown.selected = [one for one in shown.selected if one["id"] in now]

        async def choose_tags() -> None:
            await edit_tags(parts, person, [one["id"] for one in shown.selected])

        def again() -> None:
            seen[0] = -1

        tags.on_value_change(again)
        if person.may("operator"):
            label.on_click(choose_tags).bind_enabled_from(shown, "selected", bool)
            train.on_click(start)
        show()
        ui.timer(_SECONDS, show)
        ui.timer(1, lambda: machine.set_text(_machine(parts)))


def known_tags(parts: Parts) -> list[str]:
    return sorted({tag for run in parts.library.runs() for tag in run.tags})


async def edit_tags(parts: Parts, person: Person, ids: list[str]) -> None:
    """A dialog that adds and removes the tags which all these runs have."""
    runs = [run for run in parts.library.runs() if run.id in ids]
    had = set.intersection(*(set(run.tags) for run in runs)) if runs else set()
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
    with asking(f"Tags of {title}", 420) as dialog:
        chosen = ui.input_chips("Tags", value=sorted(had), new_value_mode="add-unique")
        chosen.props("hint='Type a word and press Enter'").classes("w-full")
        ui.label("In use: " + (", ".join(known_tags(parts)) or "none yet")).classes("dim small")
        choose(dialog, "Save")
    if await dialog:
        for run in runs:
            await do(_tag, parts, person, run.id, sorted({*chosen.value} - had), sorted(had - {*chosen.value}))


def _tag(parts: Parts, person: Person, id: str, add: list[str], remove: list[str]) -> None:
    try:
        parts.actions.tag(person, id, TagRun(add=add, remove=remove))
    except ValidationError:
        words = ", ".join(add)[:80]
        raise Refusal(f"tag = {words} does not serve; use up to 40 letters, digits, . _ : and -") from None


def row(run: Run) -> dict[str, Any]:
    place = f" (node {run.rank} of {run.nodes})" if run.nodes and run.nodes > 1 else ""
    shown = {
        "name": run.name + place,
        "model": run.model,
        "state": run.state,
        "description": run.description,
        "trouble": run.trouble,
    }
    shown["node"] = f"{run.node}, away since {moment(run.away_since)}" if run.away_since else run.node
    shown |= {"tags": ", ".join(run.tags), "started": moment(run.started)}
    step = 0 if run.step is None and not run.trouble else run.step
    numbers = {"progress": step, "steps": run.steps, "loss": run.loss, "speed": run.tokens_per_second}
    return {"id": run.id, "href": f"/run/{run.id}"} | shown | numbers


def _machine(parts: Parts) -> str:
    """This machine in a line."""
    node = parts.nodes.page(HERE)
    if node.report is None or not node.is_connected:
        return f"{node.name}: {node.trouble}"
    report = node.report
    kinds = [device.name for device in report.devices]
    devices = ", ".join(f"{kinds.count(kind)} x {kind}" for kind in dict.fromkeys(kinds)) or "no GPU"
    memory = f"{size(report.used_bytes or 0)} of {size(report.memory_bytes)} memory used"
    cores = f"{report.cores} cores (load {report.load:.1f})"
    return f"This machine: {devices}, {cores}, {memory}, {size(report.free_bytes)} free on disk"
