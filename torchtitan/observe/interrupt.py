"""Handles Ctrl-C, and SIGTERM and SIGUSR1, which launchers send before they take a machine away: the step is ended."""

import os
import signal
import threading
import time
from types import FrameType

from torchtitan.observe.log import logger

# What follows a signal within this time is the same one: a cluster signals every process, some of them twice.
_ONE_WARNING_SECONDS = {signal.SIGINT: 0.5, signal.SIGTERM: 3.0, signal.SIGUSR1: 3.0}
# torchrun passes its own signal on, on a busy machine late. It makes a SIGTERM of a second Ctrl-C.
_PASSED_ON_SECONDS = 10.0


class Interrupt:
    """Inside, the first signal only sets `asked`. A second signal that is no repeat of it ends the process at once."""

    def __init__(self, saves: bool = True, has_launcher: bool = False) -> None:
        self.asked, self._number, self._came_at, self._has_launcher = "", 0, 0.0, has_launcher
        self._then = "the run saves and ends after this step" if saves else "the run ends after this step, unsaved"
        again = "the same command goes on from here" if saves else "the same command begins anew"
        self.how_to_go_on = again + ("" if saves else "; with --checkpoint.enable it would go on")

    def __enter__(self) -> "Interrupt":
        self._before = {}
        if threading.current_thread() is threading.main_thread():
            self._before = {s: signal.signal(s, self._note) for s in _ONE_WARNING_SECONDS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def is_asked(self) -> bool:
        return bool(self.asked)

    def _note(self, number: int, _: FrameType | None) -> None:
        if self.asked:
            is_passed_on = self._has_launcher and number == self._number
            same = _PASSED_ON_SECONDS if is_passed_on else _ONE_WARNING_SECONDS[signal.Signals(self._number)]
            if time.monotonic() > self._came_at + same:
                os._exit(128 + number)
            return
        self._number, self._came_at = number, time.monotonic()
        self.asked = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
        logger.warning(f"{self.asked}: {self._then}; a second signal ends it at once")
