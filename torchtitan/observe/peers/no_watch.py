"""What stands in place of the watch over other ranks where there are none."""

from contextlib import AbstractContextManager, nullcontext
from types import TracebackType


class NoWatch:
    """What the loop may say to its watch. A run of one process waits for nobody; `Watch` does more."""

    step = 0

    def set_timeout(self, seconds: float) -> None:
        """How long a collective may take from now on."""

    def saving(self) -> AbstractContextManager:
        """Inside, this rank reads or writes a checkpoint: a slow disk is no hang."""
        return nullcontext()

    def reading(self) -> AbstractContextManager:
        """Inside, this rank waits for its device, and so for the collectives that are queued there."""
        return nullcontext()

    def __enter__(self) -> "NoWatch":
        return self

    def __exit__(self, _: object, error: BaseException | None, trace: TracebackType | None) -> None:
        pass
