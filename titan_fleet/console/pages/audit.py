"""Who did what and when, on what, and how it ended. For admins."""

from typing import Any

from nicegui import ui

from titan_fleet.console.pages.frame import Parts, filter_field, framed, heading, look, moment, table

_COLUMNS = [("when", "When"), ("who", "Who"), ("what", "What"), ("target", "Target"), ("outcome", "Outcome")]
_COLUMNS += [("address", "Address")]
_SECONDS = 2
_SHOWN = 500


def add(parts: Parts) -> None:
    @ui.page("/audit", dark=None)
    def audit() -> None:
        with framed("Audit") as person:
            with ui.element("div").classes("line"):
                heading("Audit")
                if not person.may("admin"):
                    ui.label(f"{person.name} is {person.role}; an admin can read this.").classes("dim")
                    return
                wanted = filter_field("actions")
            shown = table(_COLUMNS, "id", pagination={"rowsPerPage": 50}).props('no-data-label="Nothing is found"')

        async def show() -> None:
            if (rows := await look(parts.audit.newest, _SHOWN, wanted.value or "")) is not None:
                shown.rows = [_row(row) for row in rows]

        wanted.on_value_change(show)
        ui.timer(_SECONDS, show)


def _row(row: Any) -> dict[str, Any]:
    return {**row._mapping, "when": moment(row.time)}
