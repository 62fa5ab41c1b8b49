"""What a site of a swarm recorded of its meetings: who took part, what it cost, how far the sites were apart."""

from collections.abc import Callable
from typing import Annotated, Any

from nicegui import ui
from pydantic import BaseModel, Field, ValidationError

from titan_fleet.console.pages.frame import Parts, heading, live, table
from titan_fleet.console.text import inert
from torchtitan.tools.runs import Count, Label, Number

_FILE, _BYTES, _MOST = "swarm.jsonl", 2**19, 500
_SECONDS = 5
_MEETINGS = [("step", "Step"), ("fragment", "Fragment"), ("version", "Meeting"), ("sites", "Sites"), ("up", "MB up")]
_MEETINGS += [("down", "MB down"), ("seconds", "Seconds"), ("waited", "Waited, s"), ("apart", "Apart, %")]
_SITES = [("site", "Site"), ("counted", "Counted in"), ("left_out", "Left out of"), ("last", "Last at step")]


Sites = Annotated[list[Label], Field(max_length=1000)]


class _Record(BaseModel):
    step: Count
    fragment: Count
    version: Count
    counted: Sites
    rejected: Sites
    bytes_up: Number
    bytes_down: Number
    seconds: Number
    waited_seconds: Number
    apart: Number


def read_meetings(read: Callable[[str, int, int], tuple[bytes, int]]) -> list[dict[str, Any]]:
    """The newest records first; lines that are none are passed over."""
    try:
        _, size = read(_FILE, 0, 1)
        lines = read(_FILE, max(0, size - _BYTES), _BYTES)[0].splitlines()
    except FileNotFoundError:
        return []
    found = []
    for line in reversed(lines[-_MOST:]):
        try:
            found.append(_row(_Record.model_validate_json(line)))
        except ValidationError:
            continue
    return found


def _row(record: _Record) -> dict[str, Any]:
    named = {name: [inert(site[:80].encode()) for site in getattr(record, name)] for name in ("counted", "rejected")}
    numbers: dict[str, Any] = {name: getattr(record, name) for name in ("step", "fragment", "version")}
    numbers |= {"key": f"{record.fragment}.{record.version}.{record.step}"}
    measured = {"up": record.bytes_up / 1e6, "down": record.bytes_down / 1e6, "seconds": record.seconds}
    measured |= {"waited": record.waited_seconds, "apart": 100 * record.apart}
    return named | numbers | {"sites": ", ".join(named["counted"])} | {n: round(v, 2) for n, v in measured.items()}


def sites_of(meetings: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each site that the meetings name."""
    names = sorted({site for meeting in meetings for site in (*meeting["counted"], *meeting["rejected"])})
    rows = []
    for name in names:
        own = [meeting for meeting in meetings if name in meeting["counted"]]
        left_out = sum(name in meeting["rejected"] for meeting in meetings)
        last = max((meeting["step"] for meeting in own), default=None)
        rows.append({"site": name, "counted": len(own), "left_out": left_out, "last": last})
    return rows


def add_meetings(parts: Parts, id: str, tab: ui.tab) -> None:
    """The tab is there once there are meetings."""
    tab.visible = False
    heading("Sites", 2)
    sites = table(_SITES, "site", numbers=("counted", "left_out", "last"))
    heading("Meetings", 2)
    numbers = tuple(name for name, _ in _MEETINGS if name != "sites")
    meetings = table(_MEETINGS, "key", numbers=numbers, pagination={"rowsPerPage": 50})

    def show(found: list[dict[str, Any]]) -> None:
        meetings.rows, sites.rows, tab.visible = found, sites_of(found), bool(found)

    live(lambda: read_meetings(parts.library.find(id).place.read), show, _SECONDS)
