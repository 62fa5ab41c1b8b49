"""A run that can be broken and started again: its processes, its records and its checkpoints."""

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titan_fleet.drill.places import ThisMachine
from torchtitan.checkpoint.storage import Manifest, Storage
from torchtitan.launch.node import SECONDS_TO_END
from torchtitan.refusal import Refusal
from torchtitan.root import ROOT

_POLL_SECONDS = 0.02
_SECONDS_TO_LEAVE = 5


@dataclass
class BreakableRun:
    """train.py under torchrun. The run's folder in the command line identifies its processes."""

    folder: Path
    ranks: int
    steps: int
    options: Sequence[str]
    deadline: float
    place: ThisMachine

    def start(self) -> None:
        words = ["train.py", *self.options, "--job.dump_folder", str(self.folder), "--checkpoint.enable"]
        words += ["--checkpoint.folder", self.place.checkpoints(self.folder)]
        self.log = (self.folder.parent / f"{self.folder.name}.log").open("ab")
        self.launchers = [
            subprocess.Popen(
                [*before, sys.executable, *torchrun, *words],
                cwd=ROOT,
                stdout=self.log,
                stderr=self.log,
                start_new_session=True,
                preexec_fn=_obey_permissions,
                env=env,
            )
            for before, torchrun, env in self.place.launchers(self.ranks)
        ]
        self.began = len(self.records())

    def is_going(self) -> bool:
        return any(launcher.poll() is None for launcher in self.launchers)

    def wait_until(self, happened: Callable[[], object], poll_seconds: float = _POLL_SECONDS) -> bool:
        """Wait until this happens or the run ends; True if it happened."""
        try:
            while self.is_going():
                if time.monotonic() > self.deadline:
                    raise Refusal(
                        f"the drill took longer than --minutes; see the end of {self.log.name}, or raise --minutes"
                    )
                if happened():
                    return True
                time.sleep(poll_seconds)
        except BaseException:  # also Ctrl-C, which does not reach the run in its own session
            self.kill()
            raise
        return False

    def wait_for_steps(self, number: int) -> bool:
        return self.wait_until(lambda: len(self.records()) >= self.began + number)

    def end(self) -> tuple[list[int], list[int]]:
        """Wait for the end; returns the launchers' exit codes, and the ranks that outlived them."""
        self.wait_until(lambda: any(launcher.poll() is not None for launcher in self.launchers))
        late = time.monotonic() + SECONDS_TO_END
        if self.wait_until(lambda: time.monotonic() > late):
            self.kill()  # as a cluster does with the other nodes of a run when one has ended
        codes, end = [launcher.wait() for launcher in self.launchers], time.monotonic() + _SECONDS_TO_LEAVE
        while self.workers() and time.monotonic() < end:
            time.sleep(_POLL_SECONDS)
        left = self.workers()
        self.kill()
        return codes, left

    def kill(self) -> None:
        for process in [*self.workers(), *(launcher.pid for launcher in self.launchers)]:
            send(process, signal.SIGKILL)
        for launcher in self.launchers:
            launcher.wait()
        while self.workers():
            time.sleep(_POLL_SECONDS)

    def workers(self) -> list[int]:
        """Process ids of the ranks. torchrun starts each in its own session, so only their command identifies them."""
        mark, found = f"\0{self.folder}\0".encode(), []
        others = {os.getpid(), *(launcher.pid for launcher in self.launchers)}
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal() and int(entry.name) not in others:
                with contextlib.suppress(OSError):
                    if mark in (entry / "cmdline").read_bytes() and b"State:\tZ" not in (entry / "status").read_bytes():
                        found.append(int(entry.name))
        return sorted(found)

    def records(self) -> list[int]:
        return [record["step"] for record in self.told("metrics.jsonl")]

    def told(self, name: str) -> list[dict[str, Any]]:
        file = self.folder / name
        whole = file.read_text().rpartition("\n")[0] if file.exists() else ""  # the run may be writing one
        return [json.loads(line) for line in whole.splitlines()]

    def files(self) -> set[str]:
        """Names of all files but the lock, and but those of a save that was broken off, which every start removes."""
        names = {str(path.relative_to(self.folder)) for path in self.folder.rglob("*") if path.name != ".lock"}
        return {name for name in names if ".writing" not in name}

    def said(self) -> str:
        return Path(self.log.name).read_text(errors="replace")

    def last_words(self) -> str:
        return "\n".join([f"{self.log.name} ends with:", *self.said().splitlines()[-20:]])

    def storage(self) -> Storage:
        folder = self.place.checkpoints(self.folder)
        return Storage(folder if "://" in folder else str(self.folder / folder))

    def complete(self) -> list[int]:
        """The steps of the checkpoints that are whole, the newest first."""
        storage, found = self.storage(), []
        for step in storage.steps():
            manifest = storage.examine(step)
            if isinstance(manifest, Manifest) and not storage.faults(manifest, manifest.files):
                found.append(step)
        return found


def send(process: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, number)


def _obey_permissions() -> None:
    """Drop the capability that lets root write into read-only folders."""
    cap_dac_override, pr_capbset_drop = 1, 24
    ctypes.CDLL(None).prctl(pr_capbset_drop, cap_dac_override)
    cap_dac_read_search = 2
    ctypes.CDLL(None).prctl(pr_capbset_drop, cap_dac_read_search)
