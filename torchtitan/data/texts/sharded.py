"""Texts that can only be read forwards, shard by shard."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

BLOCK_CHARS = 64 << 20  # as much text as a stream holds at once


class ShardReader(ABC):
    """Reads one shard."""

    @abstractmethod
    def next(self) -> str | None:
        """The next text, or None at the end."""

    @abstractmethod
    def state(self) -> Any:
        """The place it has reached, as small plain data."""

    def __iter__(self) -> Iterator[str]:
        return iter(self.next, None)

    def read(self, count: int) -> list[str]:
        """The next `count` texts; fewer where they are very long; none at the end."""
        texts: list[str] = []
        num_chars = 0
        while len(texts) < count and num_chars < BLOCK_CHARS and (text := self.next()) is not None:
            texts.append(text)
            num_chars += len(text)
        return texts


class ShardedTexts(ABC):
    num_shards: int
    identity: str  # number, size and digest of the shards; a resumed run compares it
    _text_key: str

    @property
    def encoder(self) -> Any:
        """What encodes conversations; None: the rows are texts, and a tokenizer does."""
        return getattr(self._text_key, "encoder", None)

    @abstractmethod
    def open(self, shard: int, state: Any | None) -> ShardReader:
        """A reader at the start of the shard, or at `state`."""

    @abstractmethod
    def describe(self, shard: int, number: int) -> str: ...
