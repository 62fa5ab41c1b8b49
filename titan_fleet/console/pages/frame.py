"""What every page has: the bar above, who is logged in, and how a refusal is shown."""

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, ParamSpec, TypeVar

from nicegui import Client, run, ui
from sqlalchemy.exc import SQLAlchemyError

from titan_fleet.console.actions import Actions
from titan_fleet.console.database import Audit, Kept, no_database
from titan_fleet.console.door.people import Person
from titan_fleet.console.library import Library
from titan_fleet.console.nodes import Nodes
from torchtitan.refusal import Refusal

ICON = Path(__file__).parent / "icon.svg"
CSS = (Path(__file__).parent / "style.css").read_text(encoding="utf-8")
_PAGES = {"Runs": "/", "Nodes": "/nodes", "New run": "/new", "Compare": "/compare"}
_OF_ADMINS = {"Audit": "/audit"}
for _field in (ui.input, ui.select, ui.number, ui.input_chips):
    _field.default_props("dense outlined")
ui.button.default_props("dense padding='xs md'")
ui.checkbox.default_props("dense")
_ACTIONS = ThreadPoolExecutor(32, "action")  # some take an hour; what pages look at has NiceGUI's few threads
_SMALL = "flat round size=sm color=grey"
P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class Parts:
    """What a page is given."""

    library: Library
    nodes: Nodes
    actions: Actions
    kept: Kept
    audit: Audit


def person_of(client: Client) -> Person:
    """Who asked for this page; the gate lets nobody else use its socket."""
    person: Person = client.request.scope["state"]["person"]
    return person


def owner_of(client_id: str) -> Person | None:
    client = Client.instances.get(client_id)
    return person_of(client) if client and "person" in client.request.scope.get("state", {}) else None


@contextmanager
def framed(title: str) -> Iterator[Person]:
    """Inside, elements come into the page."""
    person = person_of(ui.context.client)
    ui.page_title(f"{title} - console")
    ui.add_head_html(f"<style>{CSS}</style>")
    ui.colors(primary="#2f6f9f", negative="#b3372f", positive="#2e7d4f")
    dark = ui.dark_mode(None)
    with ui.element("header").classes("bar"):
        ui.link("Skip to content", "#content").classes("skip")
        ui.label("torchtitan-recipe").classes("title wide")
        with ui.element("nav").classes("line").props('aria-label="Pages"'):
            for name, path in (_PAGES | (_OF_ADMINS if person.may("admin") else {})).items():
                link = ui.link(name, path)
                if name == title:
                    link.classes("here").props('aria-current="page"')
        with ui.element("div").classes("right"):
            ui.label(f"{person.name} ({person.role})").classes("small wide")
            turn = ui.button(icon="contrast", on_click=lambda: dark.set_value(not dark.value))
            turn.props(f'{_SMALL} aria-label="Dark or light"')
            if person.token:
                with ui.element("form").props('method="post" action="/logout"'):
                    ui.button("Log out").props("flat size=sm color=grey type=submit")
    with ui.element("div").classes("main").props('id="content"'):
        yield person


def heading(text: str, level: int = 1) -> None:
    with ui.element(f"h{level}"):
        ui.label(text)


async def do(action: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
    """What the action gives, done in a thread; a refusal is shown and gives None."""
    try:
        return await asyncio.get_running_loop().run_in_executor(_ACTIONS, partial(action, *args, **kwargs))
    except (Refusal, OSError, SQLAlchemyError) as error:
        text = no_database(error) if isinstance(error, SQLAlchemyError) else str(error)
        ui.notify(text, type="negative", multi_line=True, close_button="Close", timeout=0)
        return None


async def look(action: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
    """The same for a timer: what cannot be read now is read later."""
    try:
        return await run.io_bound(action, *args, **kwargs)
    except (Refusal, OSError, SQLAlchemyError):
        return None


def live(read: Callable[[], T | None], show: Callable[[T], Any], seconds: float) -> None:
    """Show what can be read, now and whenever it has changed. It is read in a thread."""
    shown: list[T] = []

    async def again() -> None:
        found = await look(read)
        if found is not None and [found] != shown:
            shown[:] = [found]
            show(found)

    ui.timer(seconds, again)


@contextmanager
def asking(title: str, width: int = 720) -> Iterator[ui.dialog]:
    """A dialog: await it for its answer. Inside, elements come into it."""
    with ui.dialog() as dialog, ui.card().style(f"min-width: min(92vw, {width}px); max-width: 92vw"):
        ui.label(title).style("font-weight: 600; overflow-wrap: anywhere")
        yield dialog
    dialog.on("hide", dialog.delete)


def choose(dialog: ui.dialog, word: str, color: str = "primary") -> ui.button:
    """The row of buttons below a dialog: its answer is True, or False."""
    with ui.row():
        go = ui.button(word, on_click=lambda: dialog.submit(True)).props(f"color={color} unelevated")
        ui.button("Back", on_click=lambda: dialog.submit(False)).props("flat autofocus")
    return go


async def confirmed(question: str, word: str) -> bool:
    with asking(question, 320) as dialog:
        choose(dialog, word, "negative")
    return bool(await dialog)


def filter_field(what: str) -> ui.input:
    return ui.input(placeholder="Filter").props(f'clearable aria-label="Filter {what}"')


def moment(seconds: float | None) -> str:
    return "" if seconds is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def table(
    columns: list[tuple[str, str]],
    key: str,
    numbers: tuple[str, ...] = (),
    formats: Mapping[str, str] = MappingProxyType({}),
    **more: Any,
) -> ui.table:
    """A dense table; a column is its name in the rows and its title. A format is a function of the page's, of value
    and row: the rows hold numbers, by which they are sorted."""
    shown: list[dict[str, Any]] = [
        {"name": name, "label": title, "field": name, "sortable": True} for name, title in columns
    ]
    for column in shown:
        column["align"] = "right" if column["name"] in numbers else "left"
        column |= {":format": formats[column["name"]]} if column["name"] in formats else {}
    made = ui.table(rows=[], columns=shown, row_key=key, **more)
    return made.props("dense flat wrap-cells").classes("w-full")


SIZE = """v => { let i = 0; for (; v >= 1024 && i < 4; i++) v /= 1024;
    return v.toFixed(i ? 1 : 0) + ' ' + ['B', 'KiB', 'MiB', 'GiB', 'TiB'][i] }"""
LINK = """<q-td :props="props"><a :href="props.row.href">{{ props.value }}</a></q-td>"""
STATE = """<q-td :props="props"><span :class="'state ' + props.value">{{ props.value }}</span>
    <div class="trouble small" v-if="props.row.trouble">{{ props.row.trouble }}</div></q-td>"""


def size(number: float) -> str:
    """`1.5 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024:
            return f"{number:.0f} B" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:.1f} TiB"
