"""What SIGTERM and SIGUSR1 ask for, a launcher's warning that the machine goes away: end soon, in good order."""

import os
import signal
import threading
import time
from types import FrameType

from torchtitan.observe.log import logger

# A cluster warns every process and torchrun passes its own warning on: what comes within this time is one warning.
_ONE_WARNING_SECONDS = 3.0
EXIT_CODE = 75  # "try again" of sysexits.h: the run is not done, and goes on when it is started again


class Interrupt:
    """Inside, the first signal only sets `asked`; a second one, not of the same warning, ends the process at once."""

    def __init__(self, saves: bool = True) -> None:
        self.asked, self._since = "", 0.0
        self._then = "the run is saved after this step and ends" if saves else "the run ends after this step, unsaved"

    def __enter__(self) -> "Interrupt":
        self._before = {}
        if threading.current_thread() is threading.main_thread():
            self._before = {s: signal.signal(s, self._note) for s in (signal.SIGTERM, signal.SIGUSR1)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def is_asked(self) -> bool:
        return bool(self.asked)

    def _note(self, number: int, _: FrameType | None) -> None:
        if self.asked:
            if time.monotonic() - self._since > _ONE_WARNING_SECONDS:
                os._exit(128 + number)
            return
        self._since = time.monotonic()
        self.asked = signal.Signals(number).name
        logger.warning(f"{self.asked}: {self._then}; a second signal ends it at once")
