"""Every run in a table, live: filter, sort, choose some to compare; and the button that trains the debug model."""

from typing import Any

from nicegui import ui

from torchtitan.console.answers import Run
from torchtitan.console.library import age
from torchtitan.console.pages.frame import LINK, STATE, Parts, do, framed, heading, size, table

_SECONDS = 1
_COLUMNS = [("name", "Run"), ("state", "State"), ("progress", "Step"), ("loss", "Loss"), ("speed", "Tokens/s")]
_COLUMNS += [("started", "Started"), ("node", "Node"), ("description", "Description")]
_NUMBERS = ("progress", "loss", "speed")


def add(parts: Parts) -> None:
    @ui.page("/", dark=None)
    def runs() -> None:
        with framed("Runs") as person:
            shown: ui.table
            machine = ui.label().classes("dim small")
            with ui.element("div").classes("line"):
                heading("Runs")
                wanted = ui.input(placeholder="Filter").props('dense outlined clearable aria-label="Filter runs"')
                ui.element("div").classes("grow")
                overlay = ui.button("Compare").props("outline dense padding='xs md'")
                overlay.on_click(
                    lambda: ui.navigate.to("/compare?runs=" + ",".join(row["id"] for row in shown.selected))
                )
                if person.may("operator"):
                    train = ui.button("Train the debug model").props("unelevated dense padding='xs md'")
            shown = table(_COLUMNS, "id", _NUMBERS, selection="multiple", pagination={"rowsPerPage": 50})
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
            machine.text = _machine(parts)
            if seen[0] != parts.library.version:
                seen[0] = parts.library.version
                shown.rows = [row(run) for run in parts.library.runs()]

        if person.may("operator"):
            train.on_click(start)
        show()
        ui.timer(_SECONDS, show)


def row(run: Run) -> dict[str, Any]:
    place = f" (node {run.rank} of {run.nodes})" if run.nodes and run.nodes > 1 else ""
    shown = {"name": run.name + place, "state": run.state, "node": run.node, "description": run.description}
    shown["progress"] = f"{run.step or 0:,}/{run.steps:,}" if run.steps else ""
    shown["loss"] = f"{run.loss:.4f}" if run.loss is not None else ""
    shown["speed"] = f"{run.tokens_per_second:,.0f}" if run.tokens_per_second is not None else ""
    shown["started"] = age(run.started) + " ago" if run.started else ""
    return {"id": run.id, "href": f"/run/{run.id}"} | shown


def _machine(parts: Parts) -> str:
    """This machine in a line."""
    node = parts.nodes.pages()[0]
    if node.report is None or not node.is_connected:
        return f"{node.name}: {node.trouble}"
    report = node.report
    kinds = [device.name for device in report.devices]
    devices = ", ".join(f"{kinds.count(kind)} x {kind}" for kind in dict.fromkeys(kinds)) or "no GPU"
    memory = f"{size(report.used_bytes or 0)} of {size(report.memory_bytes)} memory used"
    cores = f"{report.cores} cores (load {report.load:.1f})"
    return f"This machine: {devices}, {cores}, {memory}, {size(report.free_bytes)} free on disk"
