"""Ends a run of several nodes when one node's part has failed: the others' ranks may wait for it for long.

`launch ssh` does this from its terminal. Here the nodes' own records are all that is known, so it does not matter which
console started the run, and when.
"""

import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

from sqlalchemy.exc import SQLAlchemyError

from titan_fleet.console.database import Audit
from titan_fleet.console.library import Entry, Library
from titan_fleet.node import messages
from titan_fleet.ssh.client import Broken
from titan_fleet.ssh.parts import SECONDS_AFTER_A_FAILURE, at_once
from torchtitan.refusal import Refusal

_SECONDS = 2  # between two looks


def failures(entries: Sequence[Entry]) -> dict[tuple[str, str], tuple[Entry, list[Entry]]]:
    """The runs of which one part has failed while others go on: that part, and those."""
    runs: dict[tuple[str, str], list[Entry]] = defaultdict(list)
    for entry in entries:
        if entry.row.is_own and entry.row.head:
            runs[entry.row.run, entry.row.head].append(entry)
    found = {}
    for run, parts in runs.items():
        failed = next((part for part in parts if part.row.state in ("failed", "lost")), None)
        if failed and (others := [part for part in parts if part.row.state == "running"]):
            found[run] = failed, others
    return found


class Failures:
    def __init__(self, library: Library, audit: Audit, seconds: float = SECONDS_AFTER_A_FAILURE) -> None:
        self._library, self._audit, self._seconds = library, audit, seconds
        self._since: dict[tuple[str, str], float] = {}
        self._ended: set[tuple[str, str | None]] = set()  # the list of runs is seconds old

    def start(self) -> None:
        threading.Thread(target=self._watch, daemon=True, name="failures").start()

    def _watch(self) -> None:
        while True:
            time.sleep(_SECONDS)
            with suppress(OSError, SQLAlchemyError):  # it looks again
                self.look()

    def look(self) -> None:
        found = failures(self._library.entries())
        self._since = {run: self._since.get(run, time.monotonic()) for run in found}
        for run, (failed, others) in found.items():
            if time.monotonic() >= self._since[run] + self._seconds:
                # A node that is away is asked when it is back.
                there = [one for one in others if not one.member.trouble and self._key(one) not in self._ended]
                at_once(partial(self._end, failed), there)

    def _end(self, failed: Entry, entry: Entry) -> None:
        outcome = f"done: node {failed.row.rank} on {failed.page.node} {failed.row.state}"
        outcome += "" if failed.row.exit_code is None else f" with exit code {failed.row.exit_code}"
        try:
            entry.member.node.ask(messages.Stop, run=entry.row.run, seconds=0)
        except Broken:
            return
        except Refusal as error:
            outcome = f"refused: {error}"
        self._ended.add(self._key(entry))
        self._audit.write("console", "", "end", f"{entry.page.name} on {entry.page.node}", outcome)

    @staticmethod
    def _key(entry: Entry) -> tuple[str, str | None]:
        return entry.page.id, entry.row.head
