"""Finds ranks whose machine is gone: each rank's watch writes to the board (the store) again and again."""

import time

import torch.distributed as dist


class Beats:
    """Rank 0 hears all ranks, and they hear rank 0. A rank that ends writes that it has left, and is missed no more."""

    def __init__(self, board: dist.Store, rank: int, world_size: int) -> None:
        self._board, self._own = board, f"beat/{rank}"
        self._keys = [f"beat/{other}" for other in range(1 if rank else world_size)]
        self._heard: dict[int, tuple[bytes, float]] = {}  # the last beat of a rank, and when it was new
        self._listened = time.monotonic()

    def beat(self, says: str = "") -> None:
        self._board.set(self._own, says or str(time.monotonic()))

    def silent(self, seconds: float) -> list[int]:
        """Those whom this rank hears that have written nothing for so long."""
        if not self._board.check(self._keys):
            return []
        now = time.monotonic()
        if now - self._listened > seconds / 2:  # this rank stood still, and perhaps all did: none has been silent
            self._heard.clear()
        self._listened = now
        for rank, beat in enumerate(self._board.multi_get(self._keys)):
            if beat == b"left" or beat != self._heard.get(rank, (b"", now))[0]:
                self._heard[rank] = beat, now
        return [rank for rank, (_, since) in self._heard.items() if now - since > seconds]
