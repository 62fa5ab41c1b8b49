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
from typing import Annotated, Any, TypeVar

import tomli
from pydantic import AfterValidator, BaseModel, Field, ValidationError

from torchtitan.config.names import flat
from torchtitan.foreign import printable, read_piece, read_small, walk
from torchtitan.refusal import Refusal

_MOVED = ("earlier", "load_only")  # folders of a run that hold others' records
_CONFIG_BYTES = 2**18
_TAIL_BYTES, _TAIL_LINES = 2**16, 16  # the last records of a file, which may be long
_LOCK_BYTES = 2**10


HELP = "list the runs below a folder, or compare two"

Label = Annotated[str, Field(max_length=256), AfterValidator(printable)]
Count = Annotated[int, Field(strict=True, ge=0, le=2**53)]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]


class Progress(BaseModel):
    """How far a run came, as its files say. They may hold anything: `trouble` names what is left out, and why."""

    step: Count | None = None
    steps: Count | None = None
    loss: Number | None = None
    tokens_per_second: Number | None = None
    model: Label | None = None
    description: Label | None = None
    trouble: Label = ""


P = TypeVar("P", bound=Progress)


def checked(model: type[P], said: Mapping[str, Any], instead: Mapping[str, Any] | None = None) -> P:
    """A row of what somebody said. A value that it cannot hold gives way to the one in `instead`, or to none."""
    try:
        return model.model_validate(said)
    except ValidationError as error:
        mistakes = error.errors(include_url=False, include_input=False, include_context=False)
    why: dict[str, str] = {}
    for one in mistakes:
        why.setdefault(str(one["loc"][0]), one["msg"])
    words = [f"{name} = {_short(said[name])}: {why[name]}" if name in said else f"no {name}" for name in why]
    left = {name: value for name, value in said.items() if name not in why}
    words += [left["trouble"]] if left.get("trouble") else []
    return model.model_validate({**(instead or {}), **left, "trouble": "; ".join(words)[:256]})


def _short(value: Any) -> str:
    try:
        return ascii(value)[:60]
    except (ValueError, RecursionError):  # an integer of over 4,300 digits, lists in lists
        return "what has no words"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", nargs="?", default="outputs", help="where to look (default: %(default)s)")
    parser.add_argument("--compare", nargs=2, metavar=("A", "B"), help="two run folders: the keys in which they differ")


def run(args: argparse.Namespace, _: Sequence[str]) -> None:
    if args.compare:
        print("\n".join(map(printable, compare(*map(Path, args.compare)))))
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
    found = walk(folder, lambda name: name not in _MOVED and not name.startswith("step-"))
    return sorted(folder / os.path.dirname(path) for path, entry in found if entry.name == "config.toml")


def row(folder: Path) -> list[str]:
    state, run = look(folder)
    unknown = "-" if run.trouble else ""
    step, steps = (unknown or "0" if number is None else str(number) for number in (run.step, run.steps))
    cells = [
        str(folder),
        state,
        f"{step}/{steps}",
        unknown if run.loss is None else f"{run.loss:.4f}",
        unknown if run.tokens_per_second is None else f"{run.tokens_per_second:,.0f}",
        _since(folder),
        ": ".join(filter(None, (run.trouble, run.description))),
    ]
    return [" ".join(printable(cell).split()) for cell in cells]


def _since(folder: Path) -> str:
    """The time since a file of the run was written last; a dash where that is to come."""
    try:
        with os.scandir(folder) as entries:
            files = [entry.stat(follow_symlinks=False) for entry in entries if entry.is_file(follow_symlinks=False)]
    except OSError:  # the run goes on, or went
        return "-"
    age = time.time() - max((file.st_mtime for file in files), default=0.0)
    if age < -60:
        return "-"
    return f"{age / 86400:.0f} d" if age > 86400 else f"{age / 3600:.0f} h" if age > 3600 else f"{age / 60:.0f} min"


def look(folder: Path) -> tuple[str, Progress]:
    """The state of a run, and how far it came."""
    said: dict[str, Any] = {}
    troubles = []
    for read in (_configured, _recorded, _locked):
        try:
            found = read(folder)
        except FileNotFoundError:  # not yet, or not any more
            continue
        except (OSError, ValueError) as error:
            found = {"trouble": str(error)}
        said |= found
        troubles += [found["trouble"]] if found.get("trouble") else []
    state = said.pop("state", "stopped")
    progress = checked(Progress, said | {"trouble": "; ".join(troubles)[:256]})
    is_over = progress.step is not None and progress.steps is not None and progress.step >= progress.steps
    return "ended" if is_over else state, progress


def _configured(folder: Path) -> dict[str, Any]:
    """What is shown of a run's configuration."""
    status = os.stat(folder / "config.toml", follow_symlinks=False)
    return dict(_read_configured(folder, status.st_mtime_ns, status.st_size, status.st_ino))


@functools.lru_cache(maxsize=1024)
def _read_configured(folder: Path, *_: int) -> dict[str, Any]:
    """A list that is shown live asks again and again; time and size tell whether the file is still the same."""
    try:
        config = _read(folder)
    except ValueError as error:
        return {"trouble": f"config.toml cannot be read: {error}"[:256]}
    said = {"steps": config.get("training.steps")}
    for name, value in (("model", _model_of(config)), ("description", config.get("job.description"))):
        said[name] = value[:256] if isinstance(value, str) else value
    found = checked(Progress, said)
    return found.model_dump(exclude_none=True)


def _model_of(config: Mapping[str, Any]) -> Any:
    """As `llama3 8B`; a model of one's own, whose flavor nobody reads, as `net.py:SPEC`."""
    name = config.get("model.name")
    if not isinstance(name, str):
        return name
    return name.rpartition("/")[2] if ":" in name else f"{name} {config.get('model.flavor', '')}".strip()


def _read(folder: Path) -> dict[str, Any]:
    return parse_config(read_small(folder, "config.toml", _CONFIG_BYTES).decode("utf-8"))


def read_config(folder: Path) -> dict[str, Any]:
    """Each key of a run's config.toml by its dotted name, with its value."""
    try:
        return _read(folder)
    except (OSError, ValueError) as error:
        raise Refusal(f"{folder / 'config.toml'} cannot be read: {error}; name a run folder") from None


def parse_config(text: str) -> dict[str, Any]:
    """The keys of a run's config.toml by their dotted names; raises ValueError where it is none."""
    try:
        found = flat(tomli.loads(text))
        repr(found)  # raises ValueError where an integer has more digits than Python writes
    except RecursionError:
        raise ValueError("its tables are too deep") from None
    return found


def _recorded(folder: Path) -> dict[str, Any]:
    """Of the last whole line; a run may be writing another. A console asks often, so only the end is read."""
    data, size = read_piece(folder, "metrics.jsonl", -_TAIL_BYTES, _TAIL_BYTES)
    for line in reversed(data.splitlines()[-_TAIL_LINES:]):
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):  # a run's code may write anything
            continue
        if isinstance(found, dict):
            return {name: found.get(name) for name in ("step", "loss", "tokens_per_second")}
    if b"\n" in data or size > len(data):
        raise Refusal("the last lines of metrics.jsonl are no records")
    return {}


def _locked(folder: Path) -> dict[str, Any]:
    return {"state": _state_of(read_small(folder, ".lock", _LOCK_BYTES).decode("utf-8", errors="replace"))}


def _state_of(text: str) -> str:
    """What became of the process that wrote the lock. To try the lock itself would refuse a run that starts now."""
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
