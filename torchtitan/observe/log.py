"""The one logger, and how its lines look: every rank warns, rank 0 informs."""

import logging
import os
import sys

logger = logging.getLogger("torchtitan")


class _LineFormat(logging.Formatter):
    """`12:00:00 message` on rank 0; other ranks and everything above information name themselves."""

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
    """Colour only where a person looks: a terminal, unless switched off here or by NO_COLOR."""
    return sys.stderr.isatty() and not disabled and "NO_COLOR" not in os.environ


def start_logging(rank: int = 0, color: bool = False) -> None:
    """Set up the logger of this process; calling it again replaces the earlier set-up."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_LineFormat(rank, color))
    logger.handlers[:] = [handler]
    logger.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    logger.propagate = False
