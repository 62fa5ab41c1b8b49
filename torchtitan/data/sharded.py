"""Texts that can only be read forwards, shard by shard."""

from abc import ABC, abstractmethod
from typing import Any, Protocol


class ShardReader(Protocol):
    """Reads one shard. `state()` is the place it has reached, as small plain data."""

    def read(self, count: int) -> list[str]:
        """The next `count` texts, or fewer at the end of the shard."""

    def state(self) -> Any: ...


class ShardedTexts(ABC):
    name: str
    num_shards: int
    identity: str  # number and size of the shards; a resumed run compares it

    @abstractmethod
    def open(self, shard: int, state: Any | None) -> ShardReader:
        """A reader at the start of the shard, or at `state`."""

    @abstractmethod
    def describe(self, shard: int, number: int) -> str: ...
