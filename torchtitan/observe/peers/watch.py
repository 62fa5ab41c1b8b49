"""Watches the ranks: if one lags or fails, one message names that rank, and all end.

A thread beside the training loop reads a board that all ranks share, without any collective: the store in which they
met. The thread raises an alarm on the board once this rank has waited for most of the timeout in a collective. With
GPUs, from the second step on, it may have waited anywhere; in a save it never raises one. All ranks answer an alarm
with the place they have reached, and write their stacks.
"""

import json
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch
import torch.distributed as dist

from torchtitan.observe.log import logger
from torchtitan.observe.peers.beats import Beats
from torchtitan.observe.peers.hang import Whereabouts, describe, locate
from torchtitan.observe.peers.no_watch import NoWatch
from torchtitan.observe.peers.verdict import Progress, Verdict
from torchtitan.refusal import PeerError

_SECONDS_AFTER_THE_FIRST = 3


class Watch(NoWatch):
    """An error inside ends all ranks. If another rank caused the error, it becomes a PeerError."""

    def __init__(self, run_folder: Path, timeout_seconds: float, groups: Iterable[dist.ProcessGroup]) -> None:
        self._folder, self._timeout_seconds = run_folder / "hang", timeout_seconds
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self._loop, self._verdict, self._saves, self._reads = threading.get_ident(), Verdict(), False, False
        every: set[Any] = {dist.group.WORLD, *groups}
        self._backends = [group._get_backend(device) for group in every for device in group._device_types]
        # The thread gets its own client: a call that waits in another thread would block a shared one.
        store: Any = dist.distributed_c10d._get_default_store()
        self._board = dist.PrefixStore("watch", store.clone())
        self._beats = Beats(self._board, self._rank, self._world_size)
        self._thread = threading.Thread(target=self._look, name="watch", daemon=True)
        self._thread.start()

    def set_timeout(self, seconds: float) -> None:
        self._timeout_seconds = seconds
        self._verdict.look_again()

    @contextmanager
    def saving(self) -> Iterator[None]:
        before, self._saves = self._saves, True
        try:
            yield
        finally:
            self._saves = before

    @contextmanager
    def reading(self) -> Iterator[None]:
        self._reads = True
        try:
            yield
        finally:
            self._reads = False

    def __exit__(self, _: object, error: BaseException | None, trace: TracebackType | None) -> None:
        last_words = ""
        if isinstance(error, Exception):
            shown = str(error).partition("\n")[0]
            where = locate(self.step, reversed(list(traceback.walk_tb(trace))), shown)
            failed = isinstance(error, RuntimeError) and not isinstance(error, torch.OutOfMemoryError)
            if where.collective and failed:
                self._verdict.ask(where, error, self._progress(), 3 * self._grace + _SECONDS_AFTER_THE_FIRST)
            first = f"rank {self._rank} failed first, at {where}: {type(error).__name__}: {error}"
            last_words = "" if self._verdict.follows else self._verdict.standing(self._progress()) or first
        self._verdict.leave(last_words)
        self._thread.join(2 * self._grace)
        if self._verdict.thrown and (verdict := self._verdict.standing(self._progress())):
            raise PeerError(verdict.partition("\n")[0]) from None

    @property
    def _interval(self) -> float:
        return min(2.0, self._timeout_seconds / 20)

    @property
    def _grace(self) -> float:
        """Longest wait for the other ranks to read the board."""
        return 2 * self._interval + 1

    def _look(self) -> None:
        try:
            self._board.set(f"process/{self._rank}", f"process {os.getpid()} on {socket.gethostname()}")
            self._look_until_left()
            self._beats.beat("left")
            if self._verdict.last_words:
                self._board.compare_set("end", "", self._verdict.last_words)
            self._board.set(f"read/{self._rank}", "")
            if self._verdict.last_words and self._rank == 0:  # it may serve the board, so it ends after all have read
                self._comes([f"read/{rank}" for rank in range(self._world_size)])
        except RuntimeError:  # the board is gone, so rank 0 or the launcher has ended
            self._verdict.give_none()
            before = self._progress()
            if not self._verdict.has_left(self._timeout_seconds) and self._progress() == before:
                os._exit(1)
        finally:
            self._verdict.give_none()

    def _look_until_left(self) -> None:
        mark, since, alarm, reported = self._progress(), time.monotonic(), 0, False
        while not self._verdict.has_left():
            self._verdict.sleep(self._interval)
            if mark != (now := self._progress()):
                mark, since, alarm, reported = now, time.monotonic(), alarm + reported, False
            seconds = time.monotonic() - since
            self._beats.beat()
            if silent := self._beats.silent(self._timeout_seconds):  # not slow: its machine or the network is gone
                process = self._board.get(f"process/{silent[0]}").decode()
                since_when = f"for {self._timeout_seconds:.0f} s, at {self._where()}"
                last = f"rank {silent[0]} ({process}) gave no sign of life {since_when}"
                if self._board.compare_set("end", "", last).decode() == last and silent[0] == 0:
                    logger.error(last)  # otherwise rank 0 will
            if self._board.check(["end"]):
                self._follow(reported)
            elif not reported:
                if self._verdict.thrown or self._waits_long(seconds):
                    self._board.set(f"{alarm}/alarm", "")
                if self._board.check([f"{alarm}/alarm"]):
                    self._verdict.give(self._answer(f"{alarm}/", seconds), mark)
                    reported = True

    def _progress(self) -> Progress:
        """A value that changes with each step and with each collective in any group."""
        return self.step, *(backend._get_sequence_number_for_group() for backend in self._backends)

    def _waits_long(self, seconds: float) -> bool:
        """Whether torch may soon give up a collective, which can end the process at once."""
        if seconds <= self._timeout_seconds - min(30.0, self._timeout_seconds / 3):
            return False
        # A GPU that waits in a collective accepts no more work, so the host blocks wherever it queues some.
        hidden = torch.cuda.is_initialized() and self.step > 1
        return not self._saves and (hidden or bool(self._where().collective))

    def _where(self) -> Whereabouts:
        if self._verdict.thrown:
            return self._verdict.thrown[0]
        frames = _frames_of_others()
        where = locate(self.step, traceback.walk_stack(frames[self._loop]))
        if not where.collective and self._reads:
            where = replace(where, collective="what is queued on the device")
        for frame in frames.values():  # on a GPU, autograd's threads run backward and its collectives
            other = locate(self.step, traceback.walk_stack(frame))
            where = where if where.collective else replace(where, collective=other.collective)
        return where

    def _answer(self, alarm: str, seconds: float) -> str:
        """Put this rank's place on the board. Rank 0 logs all places; if it is late, the first rank to notice logs."""
        where = self._where()
        answers = {rank: f"{alarm}rank/{rank}" for rank in range(self._world_size)}
        self._board.set(answers[self._rank], json.dumps(asdict(where)))
        self._write_stacks(where)
        verdict = f"{alarm}verdict"
        self._comes([*answers.values()] if self._rank == 0 else [verdict])
        if not self._board.check([verdict]) and self._board.add(f"{alarm}speakers", 1) == 1:
            given = [rank for rank, key in answers.items() if self._board.check([key])]
            known = {rank: Whereabouts(**json.loads(self._board.get(answers[rank]))) for rank in given}
            processes = {rank: self._board.get(f"process/{rank}").decode() for rank in answers}
            message = describe(known, processes, seconds, self._folder)
            logger.error(message)
            self._write("report.txt", message + "\n")
            self._board.set(verdict, message)
        return self._board.get(verdict).decode()

    def _comes(self, keys: list[str]) -> None:
        end = time.monotonic() + self._grace
        while not self._board.check(keys) and time.monotonic() < end:
            time.sleep(0.05)

    def _follow(self, reported: bool) -> None:
        """Another rank has ended: wait until this rank's collective fails because of that, or end the process."""
        message = self._board.get("end").decode()
        self._board.set(f"read/{self._rank}", "")
        end = time.monotonic() + 2 * self._grace
        while not (self._verdict.thrown or self._verdict.has_left()) and time.monotonic() < end:
            time.sleep(0.05)
        if self._verdict.has_left():
            return
        if self._rank == 0 and not reported:
            logger.error(message)
        if not self._verdict.thrown:
            os._exit(1)
        time.sleep(_SECONDS_AFTER_THE_FIRST)  # the launcher shows the error of the first process that ends
        self._verdict.give(message, self._progress(), follows=True)
        self._verdict.has_left(None)

    def _write_stacks(self, where: Whereabouts) -> None:
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        stacks = [f"rank {self._rank}, process {os.getpid()} on {socket.gethostname()}, {time.ctime()}: {where}\n"]
        for thread, frame in _frames_of_others().items():
            stacks += [f"\nthread {names.get(thread, thread)}\n", *traceback.format_stack(frame)]
        if self._verdict.thrown:
            stacks += ["\n", *traceback.format_exception(self._verdict.thrown[1])]
        self._write(f"rank_{self._rank}.txt", "".join(stacks))

    def _write(self, name: str, text: str) -> None:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            (self._folder / name).write_text(text, encoding="utf-8")
        except OSError as error:
            logger.warning(f"{name} could not be written to {self._folder}: {error.strerror}; continuing")


def _frames_of_others() -> dict[int, FrameType]:
    """The innermost frame of every thread except this one.

    This thread's own frame would hold the dict and the dict the frame. With garbage collection off, that cycle would
    keep every tensor that the other frames hold at this moment.
    """
    frames = sys._current_frames()
    del frames[threading.get_ident()]
    return frames
