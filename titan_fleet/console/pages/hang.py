"""A hang: which ranks the others waited for, as the run's watch wrote it, and the stacks of each rank."""

from nicegui import ui

from titan_fleet.console.answers import Hang
from titan_fleet.console.pages.frame import Parts, live, look, moment

_SECONDS = 5


def add_hang(parts: Parts, id: str, tab: ui.tab, banner: ui.label) -> None:
    """The tab and the banner are there once there is a report."""
    tab.visible = banner.visible = False
    report = ui.label().classes("sample mono").style("max-width: none")
    names = ui.select([], label="Stacks of").style("min-width: 220px")
    stack = ui.label().classes("sample mono").style("max-width: none")

    def show(found: Hang) -> None:
        banner.text = _in_short(found)
        banner.classes(replace="dim" if found.went_on else "trouble")
        tab.visible = banner.visible = True
        report.text = found.report
        names.set_options(found.stacks, value=next(iter(found.stacks), None))

    async def open_stack() -> None:
        piece = await look(parts.library.log, id, str(names.value), 0) if names.value else None
        stack.text = piece.text if piece else ""

    names.on_value_change(open_stack)
    live(lambda: parts.library.hang(id), show, _SECONDS)


def _in_short(hang: Hang) -> str:
    after = "; steps were recorded since" if hang.went_on else ""
    return f"Hang at {moment(hang.written)}: {hang.report.partition(chr(10))[0]}{after}. The tab Hang shows each rank."
