"""Breaks a run in every way it knows and starts it again, until it ends where a run ends that nothing happened to."""

import argparse
import contextlib
import ctypes
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from torchtitan.checkpoint.storage import Manifest, Storage
from torchtitan.config.load import load_config
from torchtitan.launch.node import environment_here, torchrun_here
from torchtitan.refusal import Refusal

_ROOT = Path(__file__).parents[2]
_POLL_SECONDS = 0.02
_SMALL_DISK_BYTES = 4 << 30  # what may be filled without harm to others
_LEFT_FOR_LOGS_BYTES = 4 << 20
_SECONDS_TO_LEAVE = 5
_MOST_STEPS_OF_A_FAULT = 8


@dataclass
class Run:
    """The command under torchrun; its processes are told from others by the run's folder in their command line."""

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
        """Whether it happened while the run was running."""
        try:
            while self.process.poll() is None:
                if time.monotonic() > self.deadline:
                    raise Refusal(f"the drill took longer than --minutes; see the end of {self.log.name}")
                if happened():
                    return True
                time.sleep(_POLL_SECONDS)
        except BaseException:  # Ctrl-C, too, which the run, in a session of its own, does not hear
            self.kill()
            raise
        return False

    def end(self) -> tuple[int, list[int]]:
        """The exit code, and ranks that have outlived a torchrun that nobody killed."""
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
        """The ranks: torchrun gives each a session of its own, so the run's folder in their command tells them."""
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


def _wait_for_steps(run: Run, number: int) -> None:
    run.wait_until(lambda: len(run.records()) >= run.began + number)


def _kill_while_writing(run: Run, _: random.Random) -> None:
    run.wait_until(lambda: list((run.folder / "checkpoint").glob("*.writing")))
    run.kill()


def _stop_one(run: Run, chance: random.Random) -> None:
    _signal(chance.choice(run.workers() or [run.process.pid]), signal.SIGSTOP)


def _ask_to_end(run: Run, _: random.Random) -> None:
    for worker in run.workers():
        _signal(worker, signal.SIGTERM)


def _damage(how: Callable[[Path, random.Random], object], files: str = "*") -> Callable[[Run, random.Random], int]:
    """A fault that damages one of these files of the newest checkpoint, and returns its step."""

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
    """Overwrite a digit of a data stream's state: it still parses, but is not the place that the weights have seen."""
    content = file.read_bytes()
    digit = re.search(rb'": \d', content)
    if digit:
        last = digit.end() - 1
        file.write_bytes(content[:last] + b"%d" % ((int(content[last : last + 1]) + 1) % 10) + content[last + 1 :])


def _kill_after_failed_save(run: Run) -> None:
    """Wait until a save has failed (a run may go on, or end without its last one), then kill what runs."""
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


# What each returns, if anything, is the step of a checkpoint that it has damaged.
FAULTS: dict[str, Callable[[Run, random.Random], int | None]] = {
    "one rank killed": _kill_one,
    "all killed": lambda run, _: run.kill(),
    "all killed during a write": _kill_while_writing,
    "a file of the newest checkpoint truncated": _damage(_truncate),
    "a bit of it flipped": _damage(_flip),
    "a file of it deleted": _damage(lambda file, _: file.unlink()),
    "a place in the data changed": _damage(_change_the_place_in_the_data, "*.distcp"),
    "the folder read-only": _forbid_writing,
    "the disk full": _fill_the_disk,
    "a rank stopped": _stop_one,
    "SIGTERM": _ask_to_end,
}


def run(args: argparse.Namespace, options: Sequence[str]) -> int:
    """The verb; 0 if nothing was lost."""
    steps = load_config(["--checkpoint.enable", *options], args.ranks).training.steps
    out, chance, begin = Path(args.out).absolute(), random.Random(args.seed), time.monotonic()
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    deadline = begin + 60 * args.minutes
    untouched = Run(out / "untouched", args.ranks, options, deadline)
    untouched.start()
    if untouched.end()[0]:
        raise Refusal(f"the run fails without any fault; see {untouched.log.name}")
    broken = Run(out / "broken", args.ranks, options, deadline)
    print(f"{args.faults} faults to a run of {steps} steps on {args.ranks} ranks\n")
    print("| fault | at step | complete before | ended with | complete after |\n| --- | --- | --- | --- | --- |")
    names = [name for name in FAULTS if name != "the disk full" or shutil.disk_usage(out).total <= _SMALL_DISK_BYTES]
    order = [name for _ in range(-(-args.faults // len(names))) for name in chance.sample(names, len(names))]
    problems: list[str] = []
    for name in order[: args.faults]:
        if len(broken.records()) > steps - _MOST_STEPS_OF_A_FAULT:
            problems += _finish(broken, untouched, steps)
            shutil.rmtree(broken.folder)  # and from the start again
        broken.start()
        _wait_for_steps(broken, chance.randint(1, 4))
        time.sleep(chance.random() * 0.5)
        before, at = broken.complete(), (broken.records() or [0])[-1]
        damaged = FAULTS[name](broken, chance)
        (code, left), after = broken.end(), broken.complete()
        # Retention takes the oldest as new ones come, nothing takes others.
        oldest = min(after, default=-1)
        lost = [step for step in before if step not in after and step > oldest and step != damaged]
        problems += [f"{name}: nothing was noticed of the damage to step {damaged}"] if damaged in after else []
        problems += [f"{name} at step {at} lost step {step}" for step in lost]
        problems += [f"{name} at step {at} left process {process} behind" for process in left]
        print(f"| {name} | {at} | {before} | {code} | {after} |", flush=True)
    problems += _finish(broken, untouched, steps)
    seconds = time.monotonic() - begin
    print(f"\n{'; '.join(problems) or 'nothing was lost: all tensors are the same to the bit'} ({seconds:.0f} s)")
    return 1 if problems else 0


def _finish(broken: Run, untouched: Run, steps: int) -> list[str]:
    """Let the run come to its end; what is not as in the untouched one there."""
    broken.start()
    code, left = broken.end()
    if code:
        return [f"the run did not come to its end; see {broken.log.name}"]
    problems = [f"process {process} was left behind" for process in left]
    return problems + _differences(broken.storage(), untouched.storage(), steps)


def _differences(ours: Storage, theirs: Storage, step: int) -> list[str]:
    """Names of tensors that are not the same to the bit."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # there is no need for it here
    read: list[dict[str, torch.Tensor]] = []
    for storage in (ours, theirs):
        about: Any = storage.reader(step).read_metadata().state_dict_metadata
        tensors = {name: torch.empty(kind.size, dtype=kind.properties.dtype) for name, kind in about.items()}
        dcp.load(tensors, storage_reader=storage.reader(step), no_dist=True)
        read.append(tensors)
    names = read[0].keys() | read[1].keys()
    return [
        f"{n} differs"
        for n in sorted(names)
        if n not in read[0] or n not in read[1] or not read[0][n].equal(read[1][n])
    ]


def _is_complete(storage: Storage, step: int) -> bool:
    manifest = storage.examine(step)
    return isinstance(manifest, Manifest) and not storage.faults(manifest, manifest.files)


def _obey_permissions() -> None:
    """Root writes where a folder says that nobody may, by a capability; the run is to do without."""
    cap_dac_override, pr_capbset_drop = 1, 24
    ctypes.CDLL(None).prctl(pr_capbset_drop, cap_dac_override)


def _signal(process: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, number)
