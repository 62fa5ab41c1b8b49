"""A stream's place in one source, and what it needs to know about the source."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from torchtitan.data.permutation import permute
from torchtitan.data.texts.documents import Documents
from torchtitan.observe.log import logger

if TYPE_CHECKING:
    from torchtitan.data.texts.sharded import ShardedTexts

INDEX_BLOCK = 256  # permuted indices are computed in blocks of this size, which spreads the cost of a call


class DocumentRef(NamedTuple):
    """Where a document came from. Only an error turns it into words."""

    source: int
    epoch: int
    position: tuple[int, ...]


@dataclass(frozen=True)
class Source:
    """What a stream needs to know about a source."""

    name: str
    data: "Documents | ShardedTexts"
    weight: float = 1.0
    epochs: int = 1  # how often it may be read; -1: without end
    mean_tokens: float = 0.0  # estimated tokens per document; only a mix of sources uses it
    may_run_short: bool = False  # a stream without any document is no error


@dataclass(frozen=True)
class Order:
    """What decides the order of documents."""

    num_streams: int
    seed: int
    shuffle: bool


class Cursor(Protocol):
    """A stream's place in one source."""

    def next(self) -> tuple[np.ndarray, DocumentRef] | None:
        """The tokens of the next document, or None when all epochs are read."""

    def state(self) -> list[Any]: ...

    def load(self, state: Sequence[Any]) -> None: ...


class IndexedCursor:
    """Reads documents order[stream::num_streams]. Each epoch has its own permutation as order."""

    def __init__(self, source: Source, data: Documents, number: int, order: Order, stream: int) -> None:
        self._source, self._data, self._number, self._order, self._stream = source, data, number, order, stream
        self._length = len(range(stream, len(data), order.num_streams))
        self.load((0, 0))

    def load(self, state: Sequence[int]) -> None:
        self._epoch, self._position = state
        self._block: list[int] = []
        self._block_begin = 0

    def state(self) -> list[int]:
        return [self._epoch, self._position]

    def next(self) -> tuple[np.ndarray, DocumentRef] | None:
        if self._position == self._length:
            if 0 < self._source.epochs <= self._epoch + 1:
                return None
            self.load((self._epoch + 1, 0))
            log_epoch(self._source, self._epoch, self._order, self._stream)
        row = self._position - self._block_begin
        if not 0 <= row < len(self._block):
            self._read_block()
            row = 0
        index = self._block[row]
        self._position += 1
        return self._data.tokens(index), DocumentRef(self._number, self._epoch, (index,))

    def _read_block(self) -> None:
        positions = np.arange(self._position, min(self._position + INDEX_BLOCK, self._length))
        indices = positions * self._order.num_streams + self._stream
        if self._order.shuffle:
            indices = permute(len(self._data), (self._order.seed, self._number, self._epoch), indices)
        self._block, self._block_begin = indices.tolist(), self._position


def log_epoch(source: Source, epoch: int, order: Order, stream: int) -> None:
    if stream == 0:  # the other streams follow at about the same time
        order_text = "in a new order" if order.shuffle else "in the same order"
        logger.info(f"epoch {epoch + 1} of {source.name} begins, {order_text}")
