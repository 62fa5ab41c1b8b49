"""Lists the runs below a folder, or what two of them do differently.

python -m torchtitan runs                          every run below outputs/
python -m torchtitan runs outputs --compare A B    the keys in which two run folders differ
"""

import argparse
import functools
import json
import os
import re
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli

from torchtitan.config.names import flat
from torchtitan.refusal import Refusal

_MOVED = ("earlier", "load_only")  # folders of a run that hold others' records
_TAIL_BYTES = 2**16  # the last records of a file, which may be long


HELP = "list the runs below a folder, or compare two"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", nargs="?", default="outputs", help="where to look (default: %(default)s)")
    parser.add_argument("--compare", nargs=2, metavar=("A", "B"), help="two run folders: the keys in which they differ")


def run(args: argparse.Namespace, _: Sequence[str]) -> None:
    if args.compare:
        print("\n".join(compare(*map(Path, args.compare))))
        return
    folders = find_runs(Path(args.folder))
    if not folders:
        raise Refusal(f"{args.folder} holds no run (a folder with config.toml); name another folder")
    rows = [["run", "state", "step", "loss", "tok/s", "since", "description"], *map(row, folders)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for cells in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip())


def find_runs(folder: Path) -> list[Path]:
    """Every run below a folder. Checkpoints are not entered: they hold many files, and no run."""
    found = []
    for at, below, files in os.walk(folder):
        below[:] = [name for name in below if name not in _MOVED and not name.startswith("step-")]
        if "config.toml" in files:
            found.append(Path(at))
    return sorted(found)


def row(folder: Path) -> list[str]:
    try:
        config = read_config(folder)
    except Refusal:
        return [str(folder), "unreadable", "", "", "", "", ""]
    last = last_record(folder / "metrics.jsonl")
    steps, step = config.get("training.steps", 0), last.get("step", 0)
    changed = max((path.stat().st_mtime for path in folder.iterdir() if path.is_file()), default=0.0)
    age = time.time() - changed
    since = f"{age / 86400:.0f} d" if age > 86400 else f"{age / 3600:.0f} h" if age > 3600 else f"{age / 60:.0f} min"
    is_over = isinstance(step, (int, float)) and isinstance(steps, (int, float)) and step >= steps
    return [
        str(folder),
        "finished" if is_over else state_of(folder / ".lock"),
        f"{_shown(step, 'd')}/{_shown(steps, 'd')}",
        _shown(last.get("loss"), ".4f"),
        _shown(last.get("tokens_per_second"), ",.0f"),
        since,
        str(config.get("job.description", "")),
    ]


def _shown(value: Any, form: str) -> str:
    """A number in this form; a dash where a run has written something else."""
    if value is None:
        return ""
    try:
        return format(value, form)
    except (TypeError, ValueError, OverflowError):
        return "-"


def read_config(folder: Path) -> dict[str, Any]:
    file = folder / "config.toml"
    try:
        status = file.stat()
        return dict(_read_config(file, status.st_mtime_ns, status.st_size))
    except (OSError, ValueError) as error:
        raise Refusal(f"{file} cannot be read: {error}; name a run folder") from None


@functools.lru_cache(maxsize=1024)
def _read_config(file: Path, *_: int) -> dict[str, Any]:
    """A list that is shown live asks again and again; time and size tell whether the file is still the same."""
    return flat(parse_config(file.read_text(encoding="utf-8")))


def parse_config(text: str) -> dict[str, Any]:
    """The tables of a run's config.toml; raises ValueError where it is none."""
    try:
        return tomli.loads(text)
    except RecursionError:
        raise ValueError("its tables are too deep") from None


def last_record(file: Path) -> Mapping[str, Any]:
    """The last whole line; a run may be writing another. A console asks often, so only the end of the file is read."""
    if not file.is_file():
        return {}
    with file.open("rb") as source:
        source.seek(max(0, file.stat().st_size - _TAIL_BYTES))
        lines = source.read().splitlines()
    for line in reversed(lines):
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):  # a run's code may write anything
            continue
        return found if isinstance(found, dict) else {}
    return {}


def state_of(file: Path) -> str:
    """What became of the process that wrote the lock. To try the lock itself would refuse a run that starts now."""
    text = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
    if not (found := re.fullmatch(r"process (\d+) on (.+)", text)):
        return "stopped"
    process, host = int(found[1]), found[2]
    if host != socket.gethostname():
        return f"see {host}"
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return "stopped"
    except OSError:  # it is another user's
        return "running"
    return "running"


def compare(a: Path, b: Path) -> list[str]:
    ours, theirs = read_config(a), read_config(b)
    keys = [key for key in sorted(ours.keys() | theirs.keys()) if ours.get(key) != theirs.get(key)]
    lines = [f"{key}: {ours.get(key, 'absent')} | {theirs.get(key, 'absent')}" for key in keys]
    return lines or ["both have the same configuration"]
