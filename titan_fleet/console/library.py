"""Every run that the console shows, of this machine and of others: its records, logs and files.

A run is named by an id that the library gave it, so no path that a request holds is ever opened unless the run has it.
"""

import base64
import hashlib
import logging
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from titan_fleet.console import predictions
from titan_fleet.console.answers import Hang, LogMatch, LogPiece, Prediction, Run, RunPage
from titan_fleet.console.curves import Curves
from titan_fleet.console.nodes import HERE, Member, Nodes
from titan_fleet.console.text import inert, whole_characters
from titan_fleet.node import messages
from titan_fleet.node.folders import PLAN, Folders
from titan_fleet.node.messages import CHUNK_BYTES, FileRow, RunRow
from titan_fleet.ssh.client import Broken
from torchtitan.refusal import Refusal
from torchtitan.tools.runs import parse_config

_SECONDS, _SOON = 2, 0.2  # between two looks at the folders; while somebody looks at runs
_IDLE = 9  # times the CPU's time for a look, if that is more
_TOLD_SECONDS = 20
_LOG_BYTES, _SEARCH_BYTES, _MOST_MATCHES, _LINE = 2**16, 2**23, 200, 2000
_MOST_CURVES = 32  # runs whose records are kept in memory
_LOG = re.compile(r"(.*/)?([^/]*\.(log|out|err)|std(out|err)[^/]*)")
_HANG, _STACK, _REPORT_BYTES = "hang/report.txt", re.compile(r"hang/rank_[0-9]+\.txt"), 2**15
_CHECKPOINT = re.compile(r"((?:.*/)?(step-[0-9]+))/manifest\.json")


Tags = Callable[[], Mapping[str, Sequence[str]]]  # the tags of each run that has some, by its id


class Unknown(Refusal):
    """There is no such run, or no such file of it."""


class Place(Protocol):
    """Where the files of a run are."""

    def files(self) -> tuple[Sequence[FileRow], int]: ...
    def read(self, path: str, position: int, size: int) -> tuple[bytes, int]: ...


@dataclass(frozen=True)
class Local:
    folders: Folders
    run: str

    def files(self) -> tuple[Sequence[FileRow], int]:
        return self.folders.files(self.run)

    def read(self, path: str, position: int, size: int) -> tuple[bytes, int]:
        return self.folders.read(self.run, path, position, size)


@dataclass(frozen=True)
class Remote:
    member: Member
    run: str

    def files(self) -> tuple[Sequence[FileRow], int]:
        answer = self._ask(messages.Files)
        return answer.files, answer.left_out

    def read(self, path: str, position: int, size: int) -> tuple[bytes, int]:
        try:
            answer = self._ask(messages.Read, path=path, position=position, size=min(size, CHUNK_BYTES))
        except Broken:
            raise
        except Refusal as error:
            raise FileNotFoundError(str(error)) from None
        return base64.b64decode(answer.data), answer.size

    def _ask(self, request: Callable[..., messages.Request], **fields: Any) -> Any:
        """Nobody waits for a node that was there and is away."""
        if self.member.last_seen and self.member.trouble:
            raise Broken(f"{self.member.name} is away: {self.member.trouble}")
        return self.member.node.ask(request, 20, run=self.run, **fields)


@dataclass(frozen=True)
class Entry:
    page: Run
    row: RunRow
    place: Place
    member: Member


class Library:
    def __init__(self, home: Path, shown: Sequence[Path], nodes: Nodes, tags: Tags = dict) -> None:
        self._folders = Folders(home / "runs", shown)
        self._nodes, self.shown, self._tags = nodes, shown, tags
        self._entries: dict[str, Entry] = {}
        self._curves: dict[str, Curves] = {}
        self._lock, self._looking = threading.Lock(), threading.Lock()
        self._version, self._trouble = 0, ""

    def start(self) -> None:
        self._look()
        threading.Thread(target=self._watch, daemon=True, name="runs").start()

    def _watch(self) -> None:
        while True:
            spent = time.thread_time()
            self._look()
            soon = max(_SOON, _IDLE * (time.thread_time() - spent))
            time.sleep(min(soon, _SECONDS) if self._nodes.is_asked() else _SECONDS)

    def _look(self) -> None:
        try:
            self.refresh()
        except (OSError, ValueError):  # a folder went, or was written, while it was looked at
            pass
        except Exception as error:  # a hostile record ends no thread
            if self._trouble != (trouble := repr(error)):
                self._trouble = trouble
                logging.getLogger(__name__).exception("the list of runs stays as it is until it can be read again")

    def refresh(self) -> None:
        with self._looking:  # an older look never replaces a newer one
            here, tags = self._nodes.members[HERE], self._tags()
            rows: list[tuple[Member, RunRow, Place]]
            rows = [(here, row, Local(self._folders, row.run)) for row in self._folders.rows()]
            for member in self._nodes.members.values():
                rows += [(member, row, Remote(member, row.run)) for row in member.runs]
            rows.sort(key=lambda found: found[1].started or 0, reverse=True)
            found: dict[str, Entry] = {}
            for member, row, place in rows:
                entry = Entry(_page(member, row, tags), row, place, member)
                found.setdefault(entry.page.id, entry)
            if found != self._entries:
                self._entries, self._version = found, self._version + 1

    @property
    def version(self) -> int:
        """Counts the changes of the list."""
        self._nodes.ask_soon()
        return self._version

    def entries(self) -> list[Entry]:
        return list(self._entries.values())

    def runs(self, tags: Sequence[str] = ()) -> list[Run]:
        """Those that have all these tags."""
        self._nodes.ask_soon()
        return [entry.page for entry in self.entries() if set(tags) <= set(entry.page.tags)]

    def find(self, id: str) -> Entry:
        self._nodes.ask_soon()
        if (entry := self._entries.get(id)) is None:
            raise Unknown(f"run = {id[:80]!a} is not known; /api/runs lists those that are")
        return entry

    def parts_of(self, entry: Entry) -> list[Entry]:
        """A run of several nodes has a row on each; all have its name, and the place where they meet."""
        if not entry.row.head:
            return [entry]
        same = entry.row.run, entry.row.head
        return [one for one in self.entries() if one.row.is_own and (one.row.run, one.row.head) == same]

    def id_of(self, node: str, folder: str) -> str:
        """Of a run that was just started there: its node tells of it within seconds."""
        end = time.monotonic() + _TOLD_SECONDS
        while True:
            self._nodes.ask_soon()
            self.refresh()
            pages = (one.page for one in self.entries() if one.row.folder == folder and one.page.node == node)
            if (found := next(pages, None)) or time.monotonic() > end:
                return found.id if found else ""
            time.sleep(_SOON)

    def configuration(self, id: str) -> str:
        """The TOML text of the run, or of the job that is to become it."""
        entry = self.find(id)
        found = _first(entry.place, ("config.toml", f"node/{entry.row.rank or 0}/job.toml"), 2**18)
        return (found or b"").decode("utf-8", errors="replace")

    def page(self, id: str) -> RunPage:
        entry = self.find(id)
        files, _ = entry.place.files()
        logs = sorted({row.path for row in files if _LOG.fullmatch(row.path)} | ({entry.row.log or ""} - {""}))
        configuration, saved = keys_of(self.configuration(id)), list(_checkpoints(files))
        return RunPage(run=entry.page, configuration=configuration, logs=logs, checkpoints=saved)

    def checkpoint(self, id: str, name: str) -> str:
        """The folder of a checkpoint, below the run's."""
        if (found := _checkpoints(self.find(id).place.files()[0]).get(name)) is None:
            raise Unknown(f"checkpoint = {name[:80]!a} is none of this run; /api/runs/{id} lists those that are")
        return found

    def curves(self, id: str) -> Curves:
        entry = self.find(id)
        return self._kept(id).read_on(entry.place.read)

    def _kept(self, id: str) -> Curves:
        with self._lock:
            curves = self._curves.pop(id, None) or Curves()
            self._curves[id] = curves  # the newest is last
            while len(self._curves) > _MOST_CURVES:
                del self._curves[next(iter(self._curves))]
        return curves

    def log(self, id: str, path: str, position: int, search: str = "") -> LogPiece:
        """A piece of a log from a position on (a negative one counts from the end), or the lines that hold a text."""
        entry = self.find(id)
        if path != entry.row.log and not _LOG.fullmatch(path) and not _STACK.fullmatch(path):
            raise Unknown(f"log = {path[:80]!a} is none of this run; /api/runs/{id} lists those that are")
        try:
            if position < 0:
                _, size = entry.place.read(path, 0, 1)
                position = max(0, size + position)
            if search:
                return _search(entry.place, path, position, search)
            data, size = entry.place.read(path, position, _LOG_BYTES)
        except FileNotFoundError:
            return LogPiece(position=0, next=0, size=0, text="")
        data = whole_characters(data) or data
        return LogPiece(position=position, next=position + len(data), size=size, text=inert(data))

    def hang(self, id: str) -> Hang | None:
        """What the watch of the run wrote when its ranks last waited in vain."""
        place = self.find(id).place
        try:
            report, _ = place.read(_HANG, 0, _REPORT_BYTES)
        except FileNotFoundError:
            return None
        files = {row.path: row.changed for row in place.files()[0]}
        stacks = sorted(filter(_STACK.fullmatch, files), key=lambda path: int(path[len("hang/rank_") : -4]))
        written, recorded = (files.get(name) or 0.0 for name in (_HANG, "metrics.jsonl"))
        return Hang(report=inert(report).strip(), written=written, went_on=recorded > written, stacks=stacks)

    def prediction(self, id: str) -> Prediction | None:
        """What a plan said of the run: as its start sent it, or as the run kept it at its end."""
        entry = self.find(id)
        plan = _first(entry.place, (f"node/{entry.row.rank or 0}/{PLAN}", "plan_measured.json"), predictions.BYTES)
        if plan is None:
            return None
        return predictions.read_prediction(plan, _flat(self.configuration(id)), self.curves(id))

    def samples(self, id: str) -> list[tuple[int, str]]:
        """Texts that the run wrote with its weights at some steps, from its log, the newest first."""
        log = self.find(id).row.log
        samples = self._kept(id).samples
        return samples.read_on(self.log(id, log, samples.position, samples.WORDS)) if log else []

    def read(self, id: str, path: str, position: int, size: int) -> tuple[bytes, int]:
        try:
            return self.find(id).place.read(path, position, size)
        except FileNotFoundError:
            raise Unknown(f"file = {path[:80]!a} is not in this run; /files lists those that are") from None


def _first(place: Place, paths: Sequence[str], size: int) -> bytes | None:
    """The first of these files that the run has."""
    for path in paths:
        try:
            return place.read(path, 0, size)[0]
        except Broken:
            raise
        except (OSError, Refusal):
            continue
    return None


def _checkpoints(files: Sequence[FileRow]) -> dict[str, str]:
    """Each checkpoint with its folder, the oldest first. What an earlier run left in this folder is none of them."""
    found = [one for row in files if (one := _CHECKPOINT.fullmatch(row.path)) and not row.path.startswith("earlier/")]
    return {one[2]: one[1] for one in sorted(found, key=lambda one: int(one[2][5:]))}


def _search(place: Place, path: str, position: int, text: str) -> LogPiece:
    """Lines with this text, letters of either case; a search stops after some megabytes, and goes on from `next`."""
    start, needle, rest = position, text.lower().encode("utf-8", "replace"), b""
    matches: list[LogMatch] = []
    end = position + _SEARCH_BYTES
    while True:
        data, size = place.read(path, position, 2**18)
        position += len(data)
        is_last = not data or position >= size
        *lines, tail = (rest + data).split(b"\n")
        at = position - len(data) - len(rest)
        for line in [*lines, tail] if is_last else lines:
            if needle in line.lower():
                matches.append(LogMatch(position=at, line=inert(line[:_LINE])))
            at += len(line) + 1
            if len(matches) == _MOST_MATCHES:
                break
        rest = tail[-(2**16) :]
        if is_last or position >= end or len(matches) == _MOST_MATCHES:
            return LogPiece(position=start, next=min(at, position, size), size=size, text="", matches=matches)


def keys_of(toml: str) -> dict[str, str]:
    """Each key with its value in words, for a table; nothing of a text that is no TOML."""
    return {name: _word(value) for name, value in _flat(toml).items()}


def _flat(toml: str) -> dict[str, Any]:
    try:
        return parse_config(toml)
    except ValueError:
        return {}


def _word(value: Any) -> str:
    return inert((value if isinstance(value, str) else repr(value)).encode("utf-8", errors="replace"))


def _page(member: Member, row: RunRow, tags: Mapping[str, Sequence[str]]) -> Run:
    path = Path(row.folder)
    last = row.run if row.is_own else path.name  # the same run keeps its id
    name = last if row.is_own else row.run.partition("/")[2] or last
    key = hashlib.sha256(f"{member.name}\0{row.folder}\0{row.rank}".encode()).hexdigest()[:12]
    shown = re.sub(r"[^A-Za-z0-9_.-]+", "-", last)[:60].strip(".-") or "run"
    words = {name: _word(getattr(row, name) or "") for name in ("folder", "model", "description", "trouble")}
    own: dict[str, Any] = {
        "id": (id := f"{shown}-{key}"),
        "name": _word(name),
        "node": member.name,
        "tags": list(tags.get(id, ())),
        "away_since": member.last_seen if member.trouble and not member.is_here else None,
    }
    return Run(**own, **row.model_dump() | words)


def age(moment: float | None) -> str:
    """`3 min`, as a table shows it."""
    if moment is None:
        return ""
    seconds = max(0.0, time.time() - moment)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"
