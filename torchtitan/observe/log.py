"""The project's logger and the format of its lines: all ranks log warnings, and only rank 0 logs information."""

import logging
import os
import sys

logger = logging.getLogger("torchtitan")


class _LineFormat(logging.Formatter):
    """Writes `12:00:00 message`; lines of other ranks than 0, warnings and errors also show rank and level."""

    def __init__(self, rank: int, color: bool) -> None:
        super().__init__(datefmt="%H:%M:%S")
        self.rank, self.color = rank, color

    def format(self, record: logging.LogRecord) -> str:
        line = f"{self.formatTime(record, self.datefmt)} "
        if record.levelno > logging.INFO or self.rank != 0:
            label = f"[rank {self.rank}] {record.levelname.lower()}: "
            line += f"\033[33m{label}\033[0m" if self.color else label
        line += record.getMessage()
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


def wants_color(disabled: bool) -> bool:
    """Whether to color lines: only on a terminal, unless the configuration or NO_COLOR switches it off."""
    return sys.stderr.isatty() and not disabled and "NO_COLOR" not in os.environ


def start_logging(rank: int = 0, color: bool = False) -> None:
    """Set up the logger of this process; a second call replaces the first."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_LineFormat(rank, color))
    logger.handlers[:] = [handler]
    logger.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    logger.propagate = False
