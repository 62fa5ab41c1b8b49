"""A run that can be broken and started again, and the ways in which the drill breaks it."""

import contextlib
import ctypes
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from torchtitan.checkpoint.storage import Manifest, Storage
from torchtitan.launch.node import environment_here, torchrun_here
from torchtitan.refusal import Refusal

_ROOT = Path(__file__).parents[2]
_POLL_SECONDS = 0.02
_LEFT_FOR_LOGS_BYTES = 4 << 20
_SECONDS_TO_LEAVE = 5
FILLS_THE_DISK = "the disk full"


@dataclass
class Run:
    """train.py under torchrun. The run's folder in the command line identifies its processes."""

    folder: Path
    ranks: int
    options: Sequence[str]
    deadline: float

    def start(self) -> None:
        command = [sys.executable, *torchrun_here(self.ranks)]
        command += ["train.py", *self.options, "--job.dump_folder", str(self.folder), "--checkpoint.enable"]
        self.log = (self.folder.parent / f"{self.folder.name}.log").open("ab")
        self.process = subprocess.Popen(
            command,
            cwd=_ROOT,
            stdout=self.log,
            stderr=self.log,
            start_new_session=True,
            preexec_fn=_obey_permissions,
            env=environment_here(self.ranks),
        )
        self.began = len(self.records())

    def wait_until(self, happened: Callable[[], object]) -> bool:
        """Wait until this happens or the run ends; True if it happened."""
        try:
            while self.process.poll() is None:
                if time.monotonic() > self.deadline:
                    raise Refusal(
                        f"the drill took longer than --minutes; see the end of {self.log.name}, or raise --minutes"
                    )
                if happened():
                    return True
                time.sleep(_POLL_SECONDS)
        except BaseException:  # also Ctrl-C, which does not reach the run in its own session
            self.kill()
            raise
        return False

    def wait_for_steps(self, number: int) -> None:
        self.wait_until(lambda: len(self.records()) >= self.began + number)

    def end(self) -> tuple[int, list[int]]:
        """Wait for the end; returns the exit code and the ranks that outlived a torchrun which ended by itself."""
        self.wait_until(lambda: False)
        code, end = self.process.returncode, time.monotonic() + _SECONDS_TO_LEAVE
        while code >= 0 and self.workers() and time.monotonic() < end:
            time.sleep(_POLL_SECONDS)
        left = self.workers() if code >= 0 else []
        self.kill()
        return code, left

    def kill(self) -> None:
        for worker in self.workers():
            _signal(worker, signal.SIGKILL)
        _signal(self.process.pid, signal.SIGKILL)
        self.process.wait()
        while self.workers():
            time.sleep(_POLL_SECONDS)

    def workers(self) -> list[int]:
        """Process ids of the ranks. torchrun starts each in its own session, so only their command identifies them."""
        mark, found = f"\0{self.folder}\0".encode(), []
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal() and int(entry.name) not in (self.process.pid, os.getpid()):
                try:
                    if mark in (entry / "cmdline").read_bytes() and b"State:\tZ" not in (entry / "status").read_bytes():
                        found.append(int(entry.name))
                except OSError:
                    continue
        return sorted(found)

    def records(self) -> list[int]:
        file = self.folder / "metrics.jsonl"
        return [json.loads(line)["step"] for line in file.read_text().splitlines()] if file.exists() else []

    def failed_saves(self) -> int:
        return Path(self.log.name).read_text(errors="replace").count("failed: ")

    def storage(self) -> Storage:
        return Storage(str(self.folder / "checkpoint"))

    def complete(self) -> list[int]:
        return [step for step in self.storage().steps() if _is_complete(self.storage(), step)]


def _kill_one(run: Run, chance: random.Random) -> None:
    _signal(chance.choice(run.workers() or [run.process.pid]), signal.SIGKILL)


def _kill_while_writing(run: Run, _: random.Random) -> None:
    run.wait_until(lambda: list((run.folder / "checkpoint").glob("*.writing")))
    run.kill()


def _stop_one(run: Run, chance: random.Random) -> None:
    _signal(chance.choice(run.workers() or [run.process.pid]), signal.SIGSTOP)


def _ask_to_end(run: Run, _: random.Random) -> None:
    for worker in run.workers():
        _signal(worker, signal.SIGTERM)


def _damage(how: Callable[[Path, random.Random], object], files: str = "*") -> Callable[[Run, random.Random], int]:
    """A fault that damages one of these files of the newest checkpoint and returns the step."""

    def damage(run: Run, chance: random.Random) -> int:
        run.kill()
        newest = run.storage().steps()[:1]
        if not newest:
            return -1
        how(chance.choice(sorted(Path(run.storage().folder(newest[0])).glob(files))), chance)
        return newest[0]

    return damage


def _truncate(file: Path, chance: random.Random) -> None:
    os.truncate(file, chance.randrange(file.stat().st_size))


def _flip(file: Path, chance: random.Random) -> None:
    place = chance.randrange(file.stat().st_size)
    with file.open("r+b") as opened:
        opened.seek(place)
        byte = opened.read(1)[0] ^ (1 << chance.randrange(8))
        opened.seek(place)
        opened.write(bytes([byte]))


def _change_the_place_in_the_data(file: Path, _: random.Random) -> None:
    """Overwrite a digit in a data stream's state: it still parses, but names another place than the weights saw."""
    content = file.read_bytes()
    digit = re.search(rb'": \d', content)
    if digit:
        last = digit.end() - 1
        file.write_bytes(content[:last] + b"%d" % ((int(content[last : last + 1]) + 1) % 10) + content[last + 1 :])


def _kill_after_failed_save(run: Run) -> None:
    """Wait until a save has failed (the run may continue, or end because its last save failed), then kill the run."""
    before = run.failed_saves()
    run.wait_until(lambda: run.failed_saves() > before)
    run.kill()


def _forbid_writing(run: Run, _: random.Random) -> None:
    folder = run.folder / "checkpoint"
    run.wait_until(folder.exists)
    folder.chmod(0o555)
    try:
        _kill_after_failed_save(run)
    finally:
        folder.chmod(0o755)


def _fill_the_disk(run: Run, _: random.Random) -> None:
    filler = run.folder.parent / "filler"
    try:
        with filler.open("wb", buffering=0) as file:
            with contextlib.suppress(OSError):
                while True:
                    file.write(bytes(1 << 20))
            file.truncate(max(0, file.tell() - _LEFT_FOR_LOGS_BYTES))
        _kill_after_failed_save(run)
    finally:
        filler.unlink()


# A fault that damages a checkpoint returns its step.
FAULTS: dict[str, Callable[[Run, random.Random], int | None]] = {
    "one rank killed": _kill_one,
    "all ranks killed": lambda run, _: run.kill(),
    "all ranks killed during a write": _kill_while_writing,
    "a file of the newest checkpoint truncated": _damage(_truncate),
    "a bit of the newest checkpoint flipped": _damage(_flip),
    "a file of the newest checkpoint deleted": _damage(lambda file, _: file.unlink()),
    "a place in the data changed": _damage(_change_the_place_in_the_data, "*.distcp"),
    "the folder read-only": _forbid_writing,
    FILLS_THE_DISK: _fill_the_disk,
    "a rank stopped": _stop_one,
    "SIGTERM": _ask_to_end,
}


def _is_complete(storage: Storage, step: int) -> bool:
    manifest = storage.examine(step)
    return isinstance(manifest, Manifest) and not storage.faults(manifest, manifest.files)


def _obey_permissions() -> None:
    """Drop the capability that lets root write into read-only folders."""
    cap_dac_override, pr_capbset_drop = 1, 24
    ctypes.CDLL(None).prctl(pr_capbset_drop, cap_dac_override)


def _signal(process: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, number)
