"""The files of a run. A log is shown from its end, live; older parts on request; never the whole file at once.

Every piece is the text of an element, so nothing in it is code or HTML.
"""

import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any
from urllib.parse import quote

from nicegui import ui

from titan_fleet.console.answers import ExportCheckpoint, FileRow, GenerateText, LogPiece, Made, RunPage
from titan_fleet.console.library import Unknown
from titan_fleet.console.pages.frame import LINK, SIZE, Parts, do, filter_field, look, moment, person_of, table

_SECONDS, _LIST_SECONDS = 0.25, 10
_TAIL = 2**15  # bytes that are shown first
_MOST_PIECES = 200
_UNOPENED = -1
_COLUMNS = [("path", "File"), ("size", "Size"), ("changed", "Changed")]


class _LogView:
    def __init__(self, parts: Parts, id: str) -> None:
        self._library, self._id = parts.library, id
        self._start, self._next = 0, _UNOPENED  # what is shown, in bytes of the file
        self._rest = ""  # a line that has not ended yet
        self._listed_at = 0.0
        with ui.element("div").classes("line").style("margin-bottom: 10px"):
            self.names = ui.select([], label="Log").style("min-width: 220px")
            self.needle = ui.input(placeholder="Search").props('clearable aria-label="Search the log"')
            self.follow = ui.checkbox("Follow", value=True)
            ui.button("Earlier", on_click=self.earlier).props("flat")
            ui.button("Start of file", on_click=lambda: self.open_at(0)).props("flat")
            ui.button("End", on_click=lambda: self.open_at(-_TAIL)).props("flat")
            self.place = ui.label().classes("dim small number")
            self.download = ui.link("Download", "").props("download").classes("small")
        self.matches = ui.element("div").classes("mono")
        self.log = ui.scroll_area().classes("log mono").props('tabindex=0 aria-label="Log"')
        self._shown: list[ui.label] = []
        self.names.on_value_change(self.forget)
        self.needle.on("keydown.enter", self.search)
        self.needle.on("clear", self.matches.clear)
        ui.timer(_SECONDS, self.tick)

    async def tick(self) -> None:
        if not self.names.value or time.monotonic() > self._listed_at + _LIST_SECONDS:
            page, self._listed_at = await look(self._library.page, self._id), time.monotonic()
            if page is not None and page.logs and page.logs != self.names.options:
                self.names.set_options(page.logs, value=self.names.value or page.logs[0])
        if self._next == _UNOPENED:
            await self.open_at(-_TAIL)
        elif self.names.value and self.follow.value:
            name = str(self.names.value)
            piece = await look(self._library.log, self._id, name, self._next)
            if name == self.names.value:
                self.add(piece)

    def forget(self) -> None:
        """The next tick opens the log that is chosen now; so no tick adds to it what belongs elsewhere."""
        self._next = _UNOPENED

    async def open_at(self, position: int) -> None:
        if not self.names.value:
            return
        name = str(self.names.value)
        piece = await look(self._library.log, self._id, name, position)
        if piece is None or name != self.names.value:  # another log was chosen meanwhile
            return
        self.log.clear()
        self._shown.clear()
        self._start, self._next, self._rest = piece.position, piece.position, ""
        self.download.props(f'href="{_href(self._id, str(self.names.value))}"')
        self.follow.value = position < 0
        self.add(piece)
        self.log.scroll_to(percent=1.0 if self.follow.value else 0.0)

    async def earlier(self) -> None:
        await self.open_at(max(0, self._start - _TAIL))

    def add(self, piece: LogPiece | None) -> None:
        """Whole lines go into the view; a piece that does not go on from here is late."""
        if piece is None or piece.position != self._next:
            return
        self._next = piece.next
        lines, end, self._rest = (self._rest + piece.text).rpartition("\n")
        if end or (self._rest and not piece.text and self._is_over()):
            with self.log:
                self._shown.append(ui.label(lines if end else self._rest))
            self._rest = self._rest if end else ""
            if len(self._shown) > _MOST_PIECES:
                self._shown.pop(0).delete()
            if self.follow.value:
                self.log.scroll_to(percent=1.0)
        self.place.text = f"bytes {self._start:,} to {self._next:,} of {piece.size:,}"

    def _is_over(self) -> bool:
        with suppress(Unknown):
            return self._library.find(self._id).page.state != "running"
        return True

    async def search(self) -> None:
        self.matches.clear()
        if not self.needle.value or not self.names.value:
            return
        found = await do(self._library.log, self._id, str(self.names.value), 0, str(self.needle.value)[:200])
        if found is None:
            return
        with self.matches:
            more = "" if found.next >= found.size else f", looked at the first {found.next:,} bytes"
            ui.label(f"{len(found.matches)} lines{more}").classes("dim small")
            for match in found.matches[:50]:
                row = ui.button(match.line[:160], on_click=lambda at=match.position: self.open_at(at))
                row.props("flat no-caps align=left size=sm padding=none").classes("w-full mono")


def add_log(parts: Parts, id: str) -> None:
    _LogView(parts, id)


def add_files(parts: Parts, id: str) -> None:
    saved = _Checkpoints(parts, id)
    with ui.element("div").classes("line").style("margin: 10px 0"):
        wanted = filter_field("files")
        ui.button("Look again", on_click=lambda: show()).props("flat")
    shown = table(_COLUMNS, "path", ("size",), {"size": SIZE}, pagination={"rowsPerPage": 50})
    shown.add_slot("body-cell-path", LINK.replace("<a ", "<a download "))
    shown.bind_filter_from(wanted, "value")

    async def show() -> None:
        page, found = await look(parts.library.page, id), await look(parts.library.find(id).place.files)
        if page is None or found is None:
            return
        shown.rows = [_row(id, row) for row in found[0]]
        saved.show(page)

    async def exported(folder: str) -> None:
        wanted.value = folder
        await show()

    saved.then = exported
    ui.timer(0.2, show, once=True)


class _Checkpoints:
    """The checkpoints of a run, and what an operator can do with one. `then` gets the folder of an export."""

    then: Callable[[str], Awaitable[None]]

    def __init__(self, parts: Parts, id: str) -> None:
        self._actions, self._id, self._person = parts.actions, id, person_of(ui.context.client)
        self._none = ui.label("No checkpoint is saved yet.").classes("dim")
        self._line = ui.element("div").classes("line")
        with self._line:
            self._which = ui.select([], label="Checkpoint").style("min-width: 140px")
            self._prompt = ui.input("Prompt").props("maxlength=8192").classes("grow")
            self._tokens = ui.number("Tokens", value=100, min=1, max=1000, precision=0)
            self._heat = ui.number("Temperature", value=0.8, min=0, max=100, step=0.1)
            self._generate = ui.button("Generate from this", on_click=self.generate).props("outline")
            self._export = ui.button("Export", on_click=self.export).props("outline")
        self._text = ui.label().classes("sample mono")

    def show(self, page: RunPage) -> None:
        self._none.visible, self._line.visible = not page.checkpoints, bool(page.checkpoints)
        self._which.set_options(page.checkpoints, value=self._which.value or next(reversed(page.checkpoints), None))
        may = self._person.may("operator")
        self._prompt.visible = self._tokens.visible = self._heat.visible = self._generate.visible = may
        self._export.visible = may and page.run.is_own

    async def generate(self) -> None:
        numbers = {"tokens": int(self._tokens.value or 0), "temperature": float(self._heat.value or 0)}
        made = await self._made(self._actions.generate, GenerateText, prompt=self._prompt.value, **numbers)
        if made is not None:
            self._text.text = made.text

    async def export(self) -> None:
        made = await self._made(self._actions.export, ExportCheckpoint)
        if made is not None:
            ui.notify(f"{made.folder} has the weights; download its files below")
            await self.then(made.folder)

    async def _made(self, action: Callable[..., Made], wish: type[ExportCheckpoint], **given: Any) -> Made | None:
        try:
            wanted = wish(checkpoint=self._which.value, **given)
        except ValueError:
            ui.notify("give a prompt, 1 to 1000 tokens, and a temperature from 0 to 100", type="negative")
            return None
        buttons = self._generate, self._export
        for button in buttons:
            button.disable()
        self._text.text = "The node reads the checkpoint."
        made = await do(action, self._person, self._id, wanted)
        self._text.text = ""
        for button in buttons:
            button.enable()
        return made


def _href(id: str, path: str) -> str:
    return f"/api/runs/{quote(id)}/files/{quote(path)}"


def _row(id: str, row: FileRow) -> dict[str, Any]:
    return {"path": row.path, "href": _href(id, row.path), "size": row.size, "changed": moment(row.changed)}
