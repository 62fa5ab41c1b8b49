"""The ways in which the drill breaks a run."""

import contextlib
import os
import random
import re
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from titan_fleet.drill.places import ObjectStore, ThisMachine, TwoNodes
from titan_fleet.drill.run import BreakableRun, send

_LEFT_FOR_LOGS_BYTES = 4 << 20
_SMALL_DISK_BYTES = 4 << 30  # a disk of this size may be filled without harm to others


@dataclass(frozen=True)
class Outcome:
    """What a fault did to the run."""

    broke: bool = True  # False: there was nothing to break
    damaged: tuple[int, ...] = ()  # steps whose checkpoints are no longer whole
    problems: tuple[str, ...] = ()


NOTHING = Outcome(broke=False)
Act = Callable[[BreakableRun, random.Random], Outcome]


@dataclass(frozen=True)
class Fault:
    act: Act
    fits: Callable[[ThisMachine, Path], bool] = lambda place, out: True
    needs_checkpoint: bool = False


def _kill_one(run: BreakableRun, chance: random.Random) -> Outcome:
    if not (workers := run.workers()):
        return NOTHING
    send(chance.choice(workers), signal.SIGKILL)
    return Outcome()


def _kill_all(run: BreakableRun, _: random.Random) -> Outcome:
    going = run.is_going()
    run.kill()
    return Outcome(going)


def _kill_a_launcher(run: BreakableRun, chance: random.Random) -> Outcome:
    launcher = chance.choice(run.launchers)
    if launcher.poll() is not None:
        return NOTHING
    launcher.kill()  # its ranks must end by themselves; `BreakableRun.end` finds those that do not
    return Outcome()


def _kill_while_writing(run: BreakableRun, _: random.Random) -> Outcome:
    storage = run.storage()
    known = set(storage.steps())

    def is_writing() -> bool:
        if storage.is_local:
            return any(Path(storage.root).glob("*.writing"))
        return not known.issuperset(storage.steps())

    came = run.wait_until(is_writing, poll_seconds=0.002)
    run.kill()
    return Outcome(came)


def _kill_at_the_end(run: BreakableRun, chance: random.Random) -> Outcome:
    """While the run validates for the last time, or saves its last checkpoint."""
    came = run.wait_until(lambda: run.records()[-1:] == [run.steps], poll_seconds=0.002)
    time.sleep(chance.random() * 0.1)
    going = run.is_going()
    run.kill()
    return Outcome(came and going)


def _stop_one(run: BreakableRun, chance: random.Random) -> Outcome:
    if not (workers := run.workers()):
        return NOTHING
    send(chance.choice(workers), signal.SIGSTOP)
    return Outcome()


def _ask_to_end(run: BreakableRun, _: random.Random) -> Outcome:
    workers = run.workers()
    for worker in workers:
        send(worker, signal.SIGTERM)
    return Outcome(bool(workers))


def _damage(how: Callable[[bytes, random.Random], bytes | None], files: str = "") -> Act:
    """Damages one of these files of the newest checkpoint."""

    def act(run: BreakableRun, chance: random.Random) -> Outcome:
        run.kill()
        complete, storage = run.complete(), run.storage()
        if len(complete) < 2:
            return NOTHING
        names = [name for name in storage.names(storage.folder(complete[0])) if name.endswith(files)]
        for name in chance.sample(names, len(names)):
            path = f"{storage.folder(complete[0])}/{name}"
            content = storage.fs.cat_file(path)
            if (changed := how(content, chance)) == content:
                continue  # not every file holds what is to be changed
            storage.fs.rm_file(path)
            if changed is not None:
                storage.fs.pipe_file(path, changed)
            return Outcome(damaged=(complete[0],))
        return NOTHING

    return act


def _truncate(content: bytes, chance: random.Random) -> bytes:
    return content[: chance.randrange(len(content))]


def _flip(content: bytes, chance: random.Random) -> bytes:
    place = chance.randrange(len(content))
    return content[:place] + bytes([content[place] ^ (1 << chance.randrange(8))]) + content[place + 1 :]


def _change_the_place_in_the_data(content: bytes, _: random.Random) -> bytes:
    """Overwrite a digit in a data stream's state: it still parses, but names another place than the weights saw."""
    digit = re.search(rb'": \d', content)
    if digit is None:
        return content
    last = digit.end() - 1
    return content[:last] + b"%d" % ((int(content[last : last + 1]) + 1) % 10) + content[last + 1 :]


def _make_unreadable(run: BreakableRun, chance: random.Random) -> Outcome:
    """A file that may not be read, a link that leads to itself, or a folder in its place."""
    run.kill()
    if len(complete := run.complete()) < 2:
        return NOTHING
    file = chance.choice(sorted(Path(run.storage().folder(complete[0])).iterdir()))
    way = chance.randrange(3)
    if way == 0:
        file.chmod(0)
        return Outcome()  # the drill itself may be root's, and then can read it
    file.unlink()
    file.symlink_to(file.name) if way == 1 else file.mkdir()
    return Outcome(damaged=(complete[0],))


def _refused(run: BreakableRun, says: str) -> tuple[str, ...]:
    """Start the run where it has to be refused; returns what went otherwise."""
    before, records, said = run.files(), run.told("metrics.jsonl"), len(run.said())
    run.start()
    codes, _ = run.end()
    problems: list[str] = [] if all(codes) else ["a run started where it should have been refused"]
    problems += [] if says in run.said()[said:] else [f"the refusal does not say {says!r}"]
    changed = [*sorted(before ^ run.files()), *([] if records == run.told("metrics.jsonl") else ["metrics.jsonl"])]
    return (*problems, *([f"a refused start changed {', '.join(changed[:5])}"] if changed else []))


def _damage_all(run: BreakableRun, chance: random.Random) -> Outcome:
    """No checkpoint is left that could be used: a start must not begin anew. Then all are put back."""
    run.kill()
    if not run.complete():
        return NOTHING
    folder, kept = run.folder / "checkpoint", run.folder.parent / "kept"
    shutil.copytree(folder, kept)
    for checkpoint in folder.glob("step-*"):
        if files := [path for path in sorted(checkpoint.iterdir()) if path.is_file() and os.access(path, os.R_OK)]:
            file = chance.choice(files)
            file.write_bytes(_truncate(file.read_bytes(), chance))
    problems = _refused(run, "none can be used")
    shutil.rmtree(folder)
    kept.rename(folder)
    return Outcome(problems=problems)


def _take_the_disk_away(run: BreakableRun, _: random.Random) -> Outcome:
    """The folder of checkpoints is a link, and what it leads to is not mounted. Then it is back."""
    run.kill()
    folder, disk, aside = (run.folder / "checkpoint", run.folder.parent / "disk", run.folder.parent / "disk.away")
    if not folder.is_dir():
        return NOTHING
    folder.rename(aside)
    folder.symlink_to(disk)
    problems = _refused(run, "is away; mount its disk")
    folder.unlink()
    aside.rename(folder)
    return Outcome(problems=problems)


def _wait_for_a_failed_save(run: BreakableRun) -> bool:
    before = run.said().count("failed: ")
    return run.wait_until(lambda: run.said().count("failed: ") > before)


def _forbid_writing(run: BreakableRun, _: random.Random) -> Outcome:
    folder = run.folder / "checkpoint"
    if not run.wait_until(folder.exists):
        return NOTHING
    folder.chmod(0o555)
    try:
        failed = _wait_for_a_failed_save(run)  # the run goes on, or ends because its last save failed
        run.kill()
    finally:
        folder.chmod(0o755)
    return Outcome(failed)


def _fill_the_disk(run: BreakableRun, _: random.Random) -> Outcome:
    filler = run.folder.parent / "filler"
    try:
        with filler.open("wb", buffering=0) as file:
            with contextlib.suppress(OSError):
                while True:
                    file.write(bytes(1 << 20))
            file.truncate(max(0, file.tell() - _LEFT_FOR_LOGS_BYTES))
        failed = _wait_for_a_failed_save(run)
        run.kill()
    finally:
        filler.unlink()
    return Outcome(failed)


def _take_the_store_away(run: BreakableRun, chance: random.Random) -> Outcome:
    """The object store answers nothing for some seconds. The run may go on, or end and lose nothing."""
    assert isinstance(run.place, ObjectStore)
    going = run.is_going()
    run.place.away(True)
    time.sleep(0.5 + 2 * chance.random())
    run.place.away(False)
    return Outcome(going)


def _pull_the_cable(run: BreakableRun, _: random.Random) -> Outcome:
    """The nodes no longer reach each other until the head node's ranks have ended; the other cannot know why."""
    assert isinstance(run.place, TwoNodes)
    going = run.is_going()
    run.place.pull(True)
    try:
        run.wait_until(lambda: run.launchers[0].poll() is not None)
    finally:
        run.place.pull(False)
    return Outcome(going)


def _is_on_disk(place: ThisMachine, _: Path) -> bool:
    return place.is_on_disk()


def _obeys_permissions(place: ThisMachine, _: Path) -> bool:
    return place.is_on_disk() and not isinstance(place, TwoNodes)  # in a namespace of its own a user is root


def _is_small_disk(place: ThisMachine, out: Path) -> bool:
    return place.is_on_disk() and shutil.disk_usage(out).total <= _SMALL_DISK_BYTES


FAULTS: dict[str, Fault] = {
    "one rank killed": Fault(_kill_one),
    "all ranks killed": Fault(_kill_all),
    "torchrun killed": Fault(_kill_a_launcher),
    "all ranks killed during a write": Fault(_kill_while_writing),
    "all ranks killed at the end": Fault(_kill_at_the_end),
    "a rank stopped": Fault(_stop_one),
    "SIGTERM": Fault(_ask_to_end),
    "a file of the newest checkpoint truncated": Fault(_damage(_truncate), needs_checkpoint=True),
    "a bit of the newest checkpoint flipped": Fault(_damage(_flip), needs_checkpoint=True),
    "a file of the newest checkpoint deleted": Fault(_damage(lambda content, _: None), needs_checkpoint=True),
    "a place in the data changed": Fault(_damage(_change_the_place_in_the_data, ".distcp"), needs_checkpoint=True),
    "a file of the newest checkpoint unreadable": Fault(_make_unreadable, _is_on_disk, needs_checkpoint=True),
    "all checkpoints damaged": Fault(_damage_all, _is_on_disk, needs_checkpoint=True),
    "the disk of the checkpoints away": Fault(_take_the_disk_away, _is_on_disk, needs_checkpoint=True),
    "the folder read-only": Fault(_forbid_writing, _obeys_permissions),
    "the disk full": Fault(_fill_the_disk, _is_small_disk),
    "the object store away": Fault(_take_the_store_away, lambda place, _: isinstance(place, ObjectStore)),
    "the cable between the nodes pulled": Fault(_pull_the_cable, lambda place, _: isinstance(place, TwoNodes)),
}
