"""A line at the bottom of a terminal that follows the training; the log's lines appear above it."""

import atexit
import logging
import shutil
import sys
import time
from collections import deque

from torchtitan.observe.log import logger

_BARS = "▁▂▃▄▅▆▇█"
_MOST_LOSSES = 16
_SECONDS_BETWEEN = 0.2


class Live:
    """Stands in for the stream of the log's handlers. Only rank 0 on a terminal has one."""

    def __init__(self, start_step: int, total_steps: int) -> None:
        self._step, self._total = start_step, total_steps
        self._losses: deque[float] = deque(maxlen=_MOST_LOSSES)
        self._speed, self._eta, self._shown_at, self._stream = 0.0, 0.0, 0.0, sys.stderr
        self._handlers = [handler for handler in logger.handlers if isinstance(handler, logging.StreamHandler)]
        for handler in self._handlers:
            handler.setStream(self)
        atexit.register(self.close)  # also after an error

    def stepped(self) -> None:
        self._step += 1
        if time.monotonic() - self._shown_at > _SECONDS_BETWEEN:
            self._show()

    def recorded(self, step: int, loss: float, tokens_per_second: float, eta_seconds: float) -> None:
        self._step, self._speed, self._eta = step, tokens_per_second, time.monotonic() + eta_seconds
        self._losses.append(loss)
        self._show()

    def write(self, text: str) -> None:
        self._stream.write(f"\r\033[K{text}")
        if self._handlers:
            self._show()

    def flush(self) -> None:
        self._stream.flush()

    def close(self) -> None:
        for handler in self._handlers:
            handler.setStream(self._stream)
        if self._handlers:
            self._stream.write("\r\033[K")
            self._stream.flush()
        self._handlers = []

    def _show(self) -> None:
        self._shown_at = time.monotonic()
        line = self.line()[: shutil.get_terminal_size().columns - 1]  # a line that wraps could not be erased
        self._stream.write(f"\r\033[K{line}")
        self._stream.flush()

    def line(self) -> str:
        share = self._step / self._total
        bar = "█" * round(20 * share)
        parts = [f"{bar:·<20} {share:4.0%}"]
        if self._losses:
            left = max(0.0, self._eta - time.monotonic())
            parts += [
                f"{left // 60:.0f}:{left % 60:02.0f} left",
                f"loss {self._losses[-1]:.4f} {sparkline(self._losses)}",
            ]
            parts.append(f"{self._speed:,.0f} tok/s")
        return "  ".join(parts)


def sparkline(values: deque[float]) -> str:
    finite = [value for value in values if value - value == 0]
    if not finite:
        return ""
    low, high = min(finite), max(finite)
    span = (high - low) or 1.0
    return "".join(_BARS[round((value - low) / span * (len(_BARS) - 1))] for value in finite)
