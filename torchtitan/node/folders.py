"""The run folders of a node: its own below `runs/`, and those below watched folders, which can only be read.

    runs/NAME/             what train.py writes
    runs/NAME/node/RANK/   job.toml, plan.json, job.json, keeper.json, output.log, end.json of the node with this rank

A disk may be shared by the nodes of a run; each has its RANK. No path leads out of a run's folder, by links neither.
"""

import os
import secrets
import shutil
import stat
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from torchtitan.node import processes
from torchtitan.node.messages import FileRow, RunRow, Start, State, fitting
from torchtitan.refusal import Refusal
from torchtitan.tools import runs

_PARTS, PLAN = "node", "plan.json"
# A run's code may write anything into its own records.
_BROKEN = (ValueError, KeyError, TypeError, AttributeError, RecursionError, OSError)
_OVER: Mapping[str, State] = {"finished": "ended", "stopped": "stopped"}  # tools/runs.py's words, and ours


class Folders:
    def __init__(self, own: Path, watched: Sequence[Path]) -> None:
        self.own, self._watched = own.resolve(), [path.expanduser().resolve() for path in watched]
        self.own.mkdir(parents=True, exist_ok=True)

    def of(self, run: str) -> Path:
        """The folder of an own or a watched run."""
        top, rest = self.own, run
        if run.startswith("@"):
            number, _, rest = run[1:].partition("/")
            if int(number) >= len(self._watched):
                raise Refusal(f"run = {run} is in no watched folder; this node has {len(self._watched)} (--watch)")
            top = self._watched[int(number)]
        folder = inside(top, rest or ".")
        if not folder.is_dir() or not (top != self.own or (folder / _PARTS).is_dir()):
            raise Refusal(f"run = {run} is not here; `runs` lists those that are")
        return folder

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
        processes.write_whole(part / "job.toml", start.config)  # whole: another resume may read it at this moment
        if start.plan:
            processes.write_whole(part / PLAN, start.plan)
        return part

    def over(self, run: str) -> bool:
        """Whether nothing will be written any more, as far as this machine knows."""
        if run.startswith("@"):
            return runs.row(self.of(run))[1] in _OVER
        return all(
            state_of(part) != "running" if _is_ours(part) else (part / "end.json").exists()
            for part in _parts(self.of(run))
        )

    def delete(self, run: str) -> int:
        """Delete an own run that is over everywhere; the bytes that this freed."""
        if not self.over(run):
            raise Refusal(f"run = {run} still runs; stop it first")
        folder = self.of(run)
        freed = sum(row.size for row in _walk(folder))
        gone = folder.with_name(f".deleted-{secrets.token_hex(8)}")  # no half-deleted run is ever listed
        folder.rename(gone)
        shutil.rmtree(gone)
        return freed

    def files(self, run: str) -> tuple[list[FileRow], int]:
        """By their paths; where they are too many for an answer, the newest. And how many are left out."""
        rows = sorted(_walk(self.of(run)), key=lambda row: row.changed, reverse=True)
        shown = fitting(rows)
        return sorted(shown, key=lambda row: row.path), len(rows) - len(shown)

    def rows(self) -> list[RunRow]:
        """Every run, the newest first."""
        found: list[RunRow] = []
        for folder in self.own.iterdir():
            for part in filter(_is_ours, _parts(folder)):
                with suppress(*_BROKEN):
                    found.append(_own_row(folder, part))
        for number, top in enumerate(self._watched):
            for folder in runs.find_runs(top) if top.is_dir() else ():
                name = f"@{number}" if folder == top else f"@{number}/{folder.relative_to(top)}"
                with suppress(*_BROKEN):
                    found.append(_watched_row(folder, name))
        return sorted(found, key=lambda row: row.started or 0, reverse=True)


def inside(top: Path, path: str) -> Path:
    """A path below a folder, links followed; refused where it leads out."""
    found = Path(os.path.realpath(top / path))
    if path.startswith("/") or ".." in path.split("/") or not found.is_relative_to(top):
        raise Refusal(f"path = {path} leads out of the run; use a path that `files` lists")
    return found


def read_at(file: Path, position: int, size: int) -> tuple[bytes, int]:
    """Bytes of a plain file that `inside` found, and how large it is. A pipe or a device is not opened for long."""
    descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK)
    try:
        if sys.platform == "linux":  # a link may have been put there since the path was checked
            opened = os.readlink(f"/proc/self/fd/{descriptor}").removesuffix(" (deleted)")
            if opened != str(file).removesuffix(" (deleted)"):
                raise Refusal(f"{file.name} is a link by now; ask again, or use a path that `files` lists")
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise Refusal(f"{file.name} is no plain file; use a path that `files` lists")
        return os.pread(descriptor, size, position), status.st_size
    finally:
        os.close(descriptor)


def state_of(part: Path) -> State:
    """How a part of a run ended; running; or lost, if its keeper is gone and wrote nothing."""
    if end := processes.read_record(part / "end.json"):
        return end["state"]
    keeper = processes.read_record(part / "keeper.json")
    if not keeper:  # the node program that starts it has not come so far, or has died
        keeper = processes.read_record(part / "job.json").get("starter", {})
    return "running" if processes.is_alive(keeper) else "lost"


def log_of(part: Path) -> str:
    """The path of its log in the run's folder."""
    return f"{_PARTS}/{part.name}/output.log"


def _is_ours(part: Path) -> bool:
    """Whether this machine runs it. Of other machines' parts on a shared disk only the end is known."""
    return processes.is_here(processes.read_record(part / "job.json"))


def _parts(folder: Path) -> list[Path]:
    parts = folder / _PARTS
    if folder.name.startswith(".") or folder.is_symlink() or not parts.is_dir():
        return []
    return [part for part in parts.iterdir() if part.name.isdecimal() and (part / "job.json").is_file()]


def _walk(folder: Path) -> Iterator[FileRow]:
    for at, _, names in os.walk(folder):
        for name in names:
            path = os.path.relpath(os.path.join(at, name), folder)
            with suppress(OSError, ValueError):  # it is gone meanwhile, or has a name that no message takes
                status = os.lstat(os.path.join(at, name))
                if stat.S_ISREG(status.st_mode):
                    yield FileRow(path=path, size=status.st_size, changed=status.st_mtime)


def _own_row(folder: Path, part: Path) -> RunRow:
    job, end = processes.read_record(part / "job.json"), processes.read_record(part / "end.json")
    return RunRow(
        run=folder.name,
        folder=str(folder),
        state=state_of(part),
        is_own=True,
        code=os.path.basename(job["code"]),
        log=log_of(part),
        **{name: job.get(name) for name in ("rank", "nodes", "started", "head")},
        **{name: end.get(name) for name in ("ended", "exit_code")},
        **_records(folder),
    )


def _watched_row(folder: Path, name: str) -> RunRow:
    state = _OVER.get(runs.row(folder)[1], "running")
    started = (folder / "config.toml").stat().st_mtime
    return RunRow(run=name, folder=str(folder), state=state, is_own=False, started=started, **_records(folder))


def _records(folder: Path) -> dict[str, Any]:
    """What train.py has written of its progress; it may be any JSON."""
    try:
        config = runs.read_config(folder)
    except Refusal:
        config = {}
    last = runs.last_record(folder / "metrics.jsonl")
    found = {"steps": config.get("training.steps")} | {
        name: last.get(name) for name in ("step", "loss", "tokens_per_second")
    }
    numbers = {name: value for name, value in found.items() if isinstance(value, (int, float))}
    return numbers | {"description": str(config.get("job.description", ""))[:256]}
