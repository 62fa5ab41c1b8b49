"""Watches the ranks: if one lags or fails, all write their stacks, one message names that rank, and all end.

A thread beside the training loop reads a board that all ranks share, without any collective: the store in which they
met. The thread raises an alarm on the board once this rank has waited for most of the timeout in a collective (with
GPUs: anywhere except in a save), and all ranks answer the alarm with the place they have reached.
"""

import json
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch
import torch.distributed as dist

from torchtitan.observe.beats import Beats
from torchtitan.observe.hang import Whereabouts, describe, locate
from torchtitan.observe.log import logger
from torchtitan.refusal import Refusal

_SECONDS_AFTER_THE_FIRST = 3


class PeerError(Refusal):
    """This rank ends because another one lags, failed or is gone; the message about that was already shown."""


class Watch:
    """Put the training loop inside. Set `step` at each step, and call `set_timeout` when the timeout changes.

    An error inside ends all ranks. If another rank caused the error, it becomes a PeerError.
    """

    def __init__(self, run_folder: Path, timeout_seconds: float, groups: Iterable[dist.ProcessGroup]) -> None:
        self.step, self._timeout_seconds = 0, timeout_seconds
        self._folder, self._rank, self._world_size = run_folder / "hang", dist.get_rank(), dist.get_world_size()
        self._loop = threading.get_ident()
        self._wake, self._answered, self._left = threading.Event(), threading.Event(), threading.Event()
        self._thrown: tuple[Whereabouts, BaseException] | None = None  # place and error of a failed collective
        self._last_words = ""  # why this rank ends, for the other ranks
        self._verdict, self._follows = "", False  # why all ranks end, and whether another rank ended first
        self._stood: tuple[int, ...] = ()  # the progress when the verdict was given
        if self._world_size > 1:
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
        self._wake.set()  # the thread looks at once: asleep as long as before, it would see a short pause too late

    def __enter__(self) -> "Watch":
        return self

    def __exit__(self, _: object, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._world_size == 1:
            return
        if isinstance(error, Exception):
            shown = str(error).partition("\n")[0]
            where = locate(self.step, reversed(list(traceback.walk_tb(trace))), shown)
            failed = isinstance(error, RuntimeError) and not isinstance(error, torch.OutOfMemoryError)
            if where.collective and failed:
                if self._verdict and not self._standing_verdict():  # that verdict was about a pause: wait for a new one
                    self._answered.clear()
                self._thrown = where, error
                self._wake.set()
                self._answered.wait(3 * self._grace + _SECONDS_AFTER_THE_FIRST)
            first = f"rank {self._rank} failed first, at {where}: {type(error).__name__}: {error}"
            self._last_words = "" if self._follows else self._standing_verdict() or first
        self._left.set()
        self._wake.set()
        self._thread.join(self._grace)
        if self._thrown and (verdict := self._standing_verdict()):
            raise PeerError(verdict.partition("\n")[0]) from None

    def _standing_verdict(self) -> str:
        """The verdict, or "" if there was progress since: then the verdict was about a pause."""
        return self._verdict if self._stood == self._progress() else ""

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
            if self._last_words:
                self._board.compare_set("end", "", self._last_words)
        except RuntimeError:  # the board is gone, so rank 0 or the launcher has ended
            self._answered.set()
            before = self._progress()
            if not self._left.wait(self._timeout_seconds) and self._progress() == before:
                os._exit(1)
        finally:
            self._answered.set()

    def _look_until_left(self) -> None:
        mark, since, alarm, reported = self._progress(), time.monotonic(), 0, False
        while not self._left.is_set():
            self._wake.wait(self._interval)
            self._wake.clear()
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
                if self._thrown or self._waits_long(seconds):
                    self._board.set(f"{alarm}/alarm", "")
                if self._board.check([f"{alarm}/alarm"]):
                    self._verdict, self._stood, reported = self._answer(f"{alarm}/", seconds), mark, True
                    self._answered.set()

    def _progress(self) -> tuple[int, ...]:
        """A value that changes with each step and with each collective in any group."""
        return self.step, *(backend._get_sequence_number_for_group() for backend in self._backends)

    def _waits_long(self, seconds: float) -> bool:
        """Whether torch may soon give up a collective, which can end the process at once."""
        if seconds <= self._timeout_seconds - min(30.0, self._timeout_seconds / 3):
            return False
        where = self._where()
        saves = where.place.startswith("torchtitan/checkpoint/")  # a slow disk is no hang
        # A GPU that waits in a collective accepts no more work, so the host blocks wherever it queues some.
        hidden = torch.cuda.is_initialized() and self.step > 1
        return (bool(where.collective) or hidden) and not saves

    def _where(self) -> Whereabouts:
        if self._thrown:
            return self._thrown[0]
        frames = _frames_of_others()
        where = locate(self.step, traceback.walk_stack(frames[self._loop]))
        if not where.collective and where.place.startswith("torchtitan/training/report.py"):
            where = replace(where, collective="what is queued on the device")  # it reads numbers from the device
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
            self._board.set(verdict, message)
        return self._board.get(verdict).decode()

    def _comes(self, keys: list[str]) -> None:
        end = time.monotonic() + self._grace
        while not self._board.check(keys) and time.monotonic() < end:
            time.sleep(0.05)

    def _follow(self, reported: bool) -> None:
        """Another rank has ended: wait until this rank's collective fails because of that, or end the process."""
        message = self._board.get("end").decode()
        end = time.monotonic() + 2 * self._grace
        while not (self._thrown or self._left.is_set()) and time.monotonic() < end:
            time.sleep(0.05)
        if self._left.is_set():
            return
        if self._rank == 0 and not reported:
            logger.error(message)
        if not self._thrown:
            os._exit(1)
        time.sleep(_SECONDS_AFTER_THE_FIRST)  # the launcher shows the error of the first process that ends
        self._verdict, self._stood, self._follows = message, self._progress(), True
        self._answered.set()
        self._left.wait()

    def _write_stacks(self, where: Whereabouts) -> None:
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        stacks = [f"rank {self._rank}, process {os.getpid()} on {socket.gethostname()}, {time.ctime()}: {where}\n"]
        for thread, frame in _frames_of_others().items():
            stacks += [f"\nthread {names.get(thread, thread)}\n", *traceback.format_stack(frame)]
        if self._thrown:
            stacks += ["\n", *traceback.format_exception(self._thrown[1])]
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            (self._folder / f"rank_{self._rank}.txt").write_text("".join(stacks), encoding="utf-8")
        except OSError as error:
            logger.warning(f"the stacks could not be written to {self._folder}: {error.strerror}; continuing")


def _frames_of_others() -> dict[int, FrameType]:
    """The innermost frame of every thread except this one.

    This thread's own frame would hold the dict and the dict the frame. With garbage collection off, that cycle would
    keep every tensor that the other frames hold at this moment.
    """
    frames = sys._current_frames()
    del frames[threading.get_ident()]
    return frames
