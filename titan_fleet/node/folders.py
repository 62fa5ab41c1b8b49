"""The run folders of a node: its own below `runs/`, and those below watched folders, which can only be read.

    runs/NAME/             what train.py writes
    runs/NAME/node/RANK/   job.toml, plan.json, job.json, keeper.json, output.log, end.json of the node with this rank

A disk may be shared by the nodes of a run; each has its RANK. No path leads out of a run's folder, by links neither.
"""

import os
import secrets
import shutil
import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from titan_fleet.node import processes
from titan_fleet.node.messages import FileRow, RunRow, Start, State, ValidationError, fitting, moment_of, row_of
from torchtitan.foreign import printable, read_piece, walk
from torchtitan.refusal import Refusal
from torchtitan.tools import runs
from torchtitan.whole_file import write_whole

_PARTS, PLAN = "node", "plan.json"
_OVER: Mapping[str, State] = {"ended": "ended", "stopped": "stopped"}  # others are `running`, or `see` another host


class Folders:
    def __init__(self, own: Path, watched: Sequence[Path]) -> None:
        self.own, self._watched = own.resolve(), [path.expanduser().resolve() for path in watched]
        self.own.mkdir(parents=True, exist_ok=True)

    def of(self, run: str) -> Path:
        """The folder of an own or a watched run."""
        top, below = self._find(run)
        return top / below

    def _find(self, run: str) -> tuple[Path, Path]:
        """The folder in which an own or a watched run lies, and the way from there; it holds no link."""
        top, rest = self.own, run
        if run.startswith("@"):
            number, _, rest = run[1:].partition("/")
            if int(number) >= len(self._watched):
                raise Refusal(f"run = {run} is in no watched folder; this node has {len(self._watched)} (--watch)")
            top = self._watched[int(number)]
        folder = inside(top, rest or ".")
        is_run = (folder / _PARTS).is_dir() if top == self.own else os.path.lexists(folder / "config.toml")
        if not is_run:
            raise Refusal(f"run = {run} is not here; `runs` lists those that are")
        return top, folder.relative_to(top)

    def read(self, run: str, path: str, position: int, size: int) -> tuple[bytes, int]:
        """Bytes of a plain file of a run, and how large it is."""
        top, below = self._find(run)
        return read_piece(top, path if below == Path() else f"{below}/{path}", position, size)

    def parts(self, run: str) -> list[Path]:
        """Where this machine keeps its part, or parts, of an own run."""
        return [part for part in _parts(self.of(run)) if _is_ours(part)]

    def part_of(self, start: Start) -> Path:
        return self.own / start.run / _PARTS / str(start.rank)

    def prepare(self, start: Start) -> Path:
        """A new part of a run; nobody else gets the same."""
        folder, part = self.own / start.run, self.part_of(start)
        if folder.is_symlink():
            raise Refusal(f"run = {start.run} is a link; choose another name")
        if start.again and part.is_dir():
            if state_of(part) == "running" or not _is_ours(part):
                raise Refusal(f"run = {start.run} still runs, or ran on another machine; stop it, or start it there")
            for name in ("keeper.json", "stop.json", "end.json", PLAN):
                (part / name).unlink(missing_ok=True)
        else:
            try:
                part.mkdir(parents=True, mode=0o700)
            except FileExistsError:
                raise Refusal(
                    f"run = {start.run} exists already; choose another name, or ask with `again` to go on with it"
                ) from None
        write_whole(part / "job.toml", start.config, private=True)  # whole: another resume may read it at this moment
        if start.plan:
            write_whole(part / PLAN, start.plan, private=True)
        return part

    def over(self, run: str) -> bool:
        """Whether nothing will be written any more, as far as this machine knows."""
        if run.startswith("@"):
            return runs.look(self.of(run))[0] in _OVER
        return all(
            state_of(part) != "running" if _is_ours(part) else (part / "end.json").exists()
            for part in _parts(self.of(run))
        )

    def delete(self, run: str) -> int:
        """Delete an own run that is over everywhere; the bytes that this freed."""
        if not self.over(run):
            raise Refusal(f"run = {run} still runs; stop it first")
        folder = self.of(run)
        freed = sum(row.size for row in _walk(folder) if row)
        gone = folder.with_name(f".deleted-{secrets.token_hex(8)}")  # no half-deleted run is ever listed
        folder.rename(gone)
        try:
            shutil.rmtree(gone)
        except RecursionError:
            raise Refusal(f"{gone} has folders in folders, too many for Python; use rm -r on this machine") from None
        return freed

    def files(self, run: str) -> tuple[list[FileRow], int]:
        """By their paths; where they are too many for an answer, the newest. And how many are left out."""
        found = list(_walk(self.of(run)))
        shown = fitting(sorted(filter(None, found), key=lambda row: row.changed or 0, reverse=True))
        return sorted(shown, key=lambda row: row.path), len(found) - len(shown)

    def rows(self) -> list[RunRow]:
        """Every run, the newest first."""
        found = [_own_row(folder, part) for folder in self.own.iterdir() for part in _parts(folder) if _is_shown(part)]
        for number, top in enumerate(self._watched):
            for folder in runs.find_runs(top):
                name = f"@{number}" if folder == top else f"@{number}/{folder.relative_to(top)}"
                found.append(_watched_row(folder, name))
        return sorted(found, key=lambda row: row.started or 0, reverse=True)


def inside(top: Path, path: str) -> Path:
    """A path below a folder, links followed; refused where it leads out."""
    found = Path(os.path.realpath(top / path))
    if path.startswith("/") or ".." in path.split("/") or not found.is_relative_to(top):
        raise Refusal(f"path = {path} leads out of the run; use a path that `files` lists")
    return found


def state_of(part: Path) -> State:
    """How a part of a run ended; running; or lost, if its keeper is gone and wrote nothing."""
    if end := processes.read_record(part / "end.json"):
        return end["state"] if end.get("state") in get_args(State) else "lost"
    keeper: Any = processes.read_record(part / "keeper.json")
    if not keeper:  # the node program that starts it has not come so far, or has died
        keeper = processes.read_record(part / "job.json").get("starter")
    return "running" if processes.is_alive(keeper) else "lost"


def log_of(part: Path) -> str:
    """The path of its log in the run's folder."""
    return f"{_PARTS}/{part.name}/output.log"


def _is_ours(part: Path) -> bool:
    """Whether this machine runs it. Of other machines' parts on a shared disk only the end is known."""
    return processes.is_here(processes.read_record(part / "job.json"))


def _is_shown(part: Path) -> bool:
    """A part whose record nobody can read has a row here, too: it may be this machine's."""
    job = processes.read_record(part / "job.json")
    return not job or processes.is_here(job)


def _parts(folder: Path) -> list[Path]:
    parts = folder / _PARTS
    if folder.name.startswith(".") or folder.is_symlink() or parts.is_symlink():
        return []
    try:
        found = [part for part in parts.iterdir() if part.name.isdecimal() and not part.is_symlink()]
    except OSError:
        return []
    return [part for part in found if os.path.lexists(part / "job.json")]


def _walk(folder: Path) -> Iterator[FileRow | None]:
    """The plain files below a folder; None for one with a name that no message takes."""
    for path, entry in walk(folder):
        try:
            status = entry.stat(follow_symlinks=False)
        except OSError:  # it is gone meanwhile
            continue
        if stat.S_ISREG(status.st_mode):
            try:
                yield FileRow(path=path, size=status.st_size, changed=moment_of(status.st_mtime))
            except ValidationError:
                yield None


def _own_row(folder: Path, part: Path) -> RunRow:
    files = {name: part / f"{name}.json" for name in ("job", "end")}
    job, end = (processes.read_record(file) for file in files.values())
    code = job.get("code")
    said = {name: job.get(name) for name in ("rank", "nodes", "started", "head")}
    said |= {name: end.get(name) for name in ("ended", "exit_code")}
    said |= {"run": folder.name, "is_own": True, "state": end.get("state") if end else state_of(part)}
    said |= {"code": os.path.basename(code) if isinstance(code, str) else code, "log": log_of(part)}
    is_none = [file for file, record in zip(files.values(), (job, end), strict=True) if not record]
    troubles = [f"{file.relative_to(folder)} is no record" for file in is_none if os.path.lexists(file)]
    return _row(folder, runs.look(folder)[1], said, *troubles)


def _watched_row(folder: Path, name: str) -> RunRow:
    state, progress = runs.look(folder)
    try:
        started = os.stat(folder / "config.toml", follow_symlinks=False).st_mtime
    except OSError:  # it is gone meanwhile
        started = None
    said = {"run": name, "is_own": False, "state": _OVER.get(state, "running"), "started": started}
    return _row(folder, progress, said)


def _row(folder: Path, progress: runs.Progress, said: Mapping[str, Any], *troubles: str) -> RunRow:
    """What a part's records or its disk say of a run, beside what train.py has written of its progress."""
    trouble = "; ".join(filter(None, (*troubles, progress.trouble)))[:256]
    return row_of({**said, **progress.model_dump(), "folder": printable(str(folder)), "trouble": trouble})
