"""The links between nodes as a probe found them: its cluster file is read, and written anew."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tomli
from pydantic import Field

from titan_fleet.console.answers import Answer
from titan_fleet.ssh.parts import Part, at_once, end
from titan_fleet.ssh.probe import collect, delete
from torchtitan.refusal import Refusal
from torchtitan.whole_file import write_whole

_SECONDS = 900
Matrix = list[list[Annotated[float, Field(ge=0, allow_inf_nan=False)]]]


class Links(Answer):
    """From each node, a row, to each: Gbit/s and the delay in ms."""

    hosts: Annotated[list[str], Field(max_length=1024)]
    gbit: Matrix
    delay_ms: Matrix
    rests_on: str


def read_links(file: Path) -> Links | None:
    """What the newest probe of several nodes found, if there was one."""
    try:
        tables = tomli.loads(file.read_text(encoding="utf-8"))
        found = {name: tables["probe"][name] for name in ("hosts", "gbit", "delay_ms")}
        return Links(**found, rests_on=tables["rests_on"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def take(run: str, parts: Sequence[Part], file: Path) -> None:
    """Wait for the end of a probe, and keep its cluster file."""
    try:
        _wait(run, parts)
        text = collect(run, parts)
    except Refusal:
        end(run, parts, 0)
        raise
    file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(file, text)
    delete(run, parts)


def _wait(run: str, parts: Sequence[Part]) -> None:
    last = time.monotonic() + _SECONDS
    while True:
        rows = at_once(lambda part: part.row(run), parts)
        states = {part.name: row.state if row else "gone" for part, row in zip(parts, rows, strict=True)}
        if bad := next((name for name, state in states.items() if state not in ("running", "ended")), None):
            raise Refusal(f"the run {run}, a probe, is {states[bad]} on {bad}; its log there says why")
        if "running" not in states.values():
            return
        if time.monotonic() > last:
            raise Refusal(f"the run {run}, a probe, goes on after {_SECONDS} s; look at its log")
        time.sleep(1)
