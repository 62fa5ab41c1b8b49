"""Breaks a run in every way it knows and starts it again, until it ends where a run ends that nothing happened to."""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from torchtitan.checkpoint.storage import IncompleteError, Storage
from torchtitan.config.load import load_config

_ROOT = Path(__file__).parents[1]
_POLL_SECONDS = 0.02


@dataclass
class Run:
    """The command under torchrun, in a session of its own so that its processes can be told from others."""

    folder: Path
    ranks: int
    options: Sequence[str]
    deadline: float

    def start(self) -> None:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={self.ranks}"]
        command += ["train.py", *self.options, "--job.dump_folder", str(self.folder), "--checkpoint.enable"]
        self.log = (self.folder.parent / f"{self.folder.name}.log").open("ab")
        threads = str(max(1, (os.cpu_count() or 1) // self.ranks))
        self.process = subprocess.Popen(
            command,
            cwd=_ROOT,
            stdout=self.log,
            stderr=self.log,
            start_new_session=True,
            env={"OMP_NUM_THREADS": threads, **os.environ},
        )
        self.began = len(self.records())

    def wait_until(self, happened: Callable[[], object]) -> bool:
        """Whether it happened while the run was running."""
        while self.process.poll() is None:
            if time.monotonic() > self.deadline:
                self.kill()
                raise TimeoutError(f"the drill took longer than --minutes; the end of {self.log.name} says where it is")
            if happened():
                return True
            time.sleep(_POLL_SECONDS)
        return False

    def end(self) -> int:
        self.wait_until(lambda: False)
        self.kill()  # of a torchrun that was killed, its ranks
        return self.process.returncode

    def kill(self) -> None:
        for worker in self.workers():
            _signal(worker, signal.SIGKILL)
        _signal(self.process.pid, signal.SIGKILL)
        self.process.wait()
        while self.workers():
            time.sleep(_POLL_SECONDS)

    def workers(self) -> list[int]:
        """The ranks: torchrun gives each a session of its own, but not another environment."""
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

    def storage(self) -> Storage:
        return Storage(str(self.folder / "checkpoint"))

    def complete(self) -> list[int]:
        return [step for step in self.storage().steps() if _is_complete(self.storage(), step)]


def _kill_one(run: Run, chance: random.Random) -> None:
    _signal(chance.choice(run.workers() or [run.process.pid]), signal.SIGKILL)


def _kill_all(run: Run, _: random.Random) -> None:
    run.kill()


def _kill_while_writing(run: Run, _: random.Random) -> None:
    run.wait_until(lambda: list((run.folder / "checkpoint").glob("*.writing")))
    run.kill()


def _stop_one(run: Run, chance: random.Random) -> None:
    _signal(chance.choice(run.workers() or [run.process.pid]), signal.SIGSTOP)


def _ask_to_end(run: Run, _: random.Random) -> None:
    for worker in run.workers():
        _signal(worker, signal.SIGTERM)


def _damage(how: Callable[[Path, random.Random], None]) -> Callable[[Run, random.Random], None]:
    def damage(run: Run, chance: random.Random) -> None:
        run.kill()
        newest = run.storage().steps()[:1]
        files = sorted(Path(run.storage().folder(newest[0])).iterdir()) if newest else []
        if files:
            how(chance.choice(files), chance)

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


def _block_saves(run: Run, _: random.Random) -> None:
    """As a full disk or a folder without permission does: the next saves cannot be written."""
    folder = run.folder / "checkpoint"
    free = [
        folder / f"step-{step}.writing" for step in range(1, 2000) if not (folder / f"step-{step}.writing").exists()
    ]
    folder.mkdir(parents=True, exist_ok=True)
    for path in free:
        path.touch()
    saved = len(run.records())
    run.wait_until(lambda: len(run.records()) > saved + 3)
    run.kill()


FAULTS: dict[str, Callable[[Run, random.Random], None]] = {
    "one rank killed": _kill_one,
    "all killed": _kill_all,
    "all killed during a write": _kill_while_writing,
    "a file of the newest checkpoint truncated": _damage(_truncate),
    "a bit of it flipped": _damage(_flip),
    "a file of it deleted": _damage(lambda file, _: file.unlink()),
    "saves cannot be written": _block_saves,
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
    if untouched.end():
        raise ValueError(f"the run fails without any fault; see {untouched.log.name}")
    broken = Run(out / "broken", args.ranks, options, deadline)
    print(f"{args.faults} faults to a run of {steps} steps on {args.ranks} ranks\n")
    print("| fault | at step | complete before | ended with | complete after |\n| --- | --- | --- | --- | --- |")
    order = [name for _ in range(-(-args.faults // len(FAULTS))) for name in chance.sample([*FAULTS], len(FAULTS))]
    problems: list[str] = []
    for name in order[: args.faults]:
        if broken.complete()[:1] == [steps]:
            shutil.rmtree(broken.folder)  # it got to its end: from the start again
        broken.start()
        wanted = broken.began + chance.randint(1, 4)
        broken.wait_until(lambda wanted=wanted: len(broken.records()) >= wanted)
        time.sleep(chance.random() * 0.5)
        before, at = broken.complete(), (broken.records() or [0])[-1]
        FAULTS[name](broken, chance)
        code, after = broken.end(), broken.complete()
        damaged = 1 if "newest" in name or "of it" in name else 0
        lost = [step for step in before[damaged:] if step not in after]
        problems += [f"{name} at step {at} lost step {step}" for step in lost]
        print(f"| {name} | {at} | {before} | {code} | {after} |", flush=True)
    broken.start()
    if broken.end():
        problems.append(f"the run did not come to its end; see {broken.log.name}")
    else:
        problems += _differences(broken.storage(), untouched.storage(), steps)
    problems += [f"process {pid} was left behind" for pid in broken.workers()]
    seconds = time.monotonic() - begin
    print(f"\n{'; '.join(problems) or 'nothing was lost: all tensors are the same to the bit'} ({seconds:.0f} s)")
    return 1 if problems else 0


def _differences(ours: Storage, theirs: Storage, step: int) -> list[str]:
    """Names of tensors that are not the same to the bit."""
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
    try:
        manifest = storage.manifest(step)
    except IncompleteError:
        return False
    return not storage.faults(manifest, manifest.files)


def _signal(process: int, number: int) -> None:
    try:
        os.kill(process, number)
    except ProcessLookupError:
        pass
