"""A stream of documents. It has its own part of every source, its own order, and a position small enough to save.

Which documents a stream reads depends on the data, the seed and the number of streams, but never on the ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from torchtitan.data.documents import Documents
from torchtitan.data.permutation import permute
from torchtitan.data.sharded import ShardedTexts, ShardReader
from torchtitan.data.tokenizer import Tokenizer
from torchtitan.observe.log import logger
from torchtitan.refusal import Refusal

INDEX_BLOCK = 256  # permuted indices are computed in blocks of this size, which spreads the cost of a call
SHUFFLE_BLOCK = 512  # a stream shuffles a shard within blocks of this many documents, which it holds as text


class DocumentRef(NamedTuple):
    """Where a document came from. Only an error turns it into words."""

    source: int
    epoch: int
    position: tuple[int, ...]


@dataclass(frozen=True)
class Source:
    """What a stream needs to know about a source."""

    name: str
    data: Documents | ShardedTexts
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


class ShardedCursor:
    """Reads shards one after the other and shuffles documents within blocks. Streams may share a shard.

    If there are at most as many streams as shards, a stream owns shards order[stream::num_streams]. If there are more,
    all streams that are congruent modulo the number of shards read the same shard, and n such streams each keep every
    n-th document.
    """

    def __init__(
        self, source: Source, data: ShardedTexts, number: int, order: Order, stream: int, tokenizer: Tokenizer
    ) -> None:
        self._source, self._data, self._number, self._order, self._stream = source, data, number, order, stream
        self._tokenizer = tokenizer
        self._share = len(range(stream % data.num_shards, order.num_streams, data.num_shards))
        self._first = stream // data.num_shards
        self._begin_epoch(0)

    def _begin_epoch(self, epoch: int) -> None:
        self._epoch, self._found = epoch, False
        shards = np.arange(self._data.num_shards)
        if self._order.shuffle:
            shards = permute(self._data.num_shards, (self._order.seed, self._number, epoch), shards)
        self._shards = shards[self._stream % self._data.num_shards :: self._order.num_streams].tolist()
        self._begin_shard(0)

    def _begin_shard(self, shard: int) -> None:
        self._shard, self._num_read = shard, 0  # num_read: documents of the shard before the current block
        self._reader: ShardReader | None = None
        self._reader_state: Any = None  # at the start of the current block
        self._block: list[tuple[int, str]] = []
        self._block_size = self._offset = 0  # offset: how many of this stream's documents in the block it has returned

    def state(self) -> list[Any]:
        return [self._epoch, self._shard, self._num_read, self._reader_state, self._offset]

    def load(self, state: Sequence[Any]) -> None:
        epoch, shard, num_read, reader_state, offset = state
        self._begin_epoch(epoch)
        self._begin_shard(shard)
        self._found = shard > 0 or reader_state is not None
        if reader_state is not None:
            self._num_read = num_read
            self._reader = self._data.open(self._shards[shard], reader_state)
            self._read_block()
            self._offset = offset

    def next(self) -> tuple[np.ndarray, DocumentRef] | None:
        while self._offset == len(self._block):
            if self._shard == len(self._shards):
                if not self._found and self._source.may_run_short:
                    return None
                if not self._found:
                    raise Refusal(
                        f"{self._source.name}: stream {self._stream} of {self._order.num_streams} found no document in "
                        f"{self._data.num_shards} shards; set training.num_streams lower"
                    )
                if 0 < self._source.epochs <= self._epoch + 1:
                    return None
                self._begin_epoch(self._epoch + 1)
                log_epoch(self._source, self._epoch, self._order, self._stream)
            self._read_block()
        number, text = self._block[self._offset]
        self._offset += 1
        self._found = True
        tokens = np.array(self._tokenizer.encode(text, bos=True, eos=True), dtype=np.int32)
        return tokens, DocumentRef(self._number, self._epoch, (self._shards[self._shard], number))

    def _read_block(self) -> None:
        shard = self._shards[self._shard]
        if self._reader is None:
            self._reader = self._data.open(shard, None)
        self._num_read += self._block_size
        self._reader_state = self._reader.state()
        texts = self._reader.read(SHUFFLE_BLOCK * self._share)
        if not texts:
            self._begin_shard(self._shard + 1)
            return
        # Blocks begin at multiples of the share, so all streams that share a shard count its documents alike.
        own = np.arange(self._first, len(texts), self._share)
        if self._order.shuffle and len(own):
            key = (self._order.seed, self._number, self._epoch, shard, self._num_read)
            own = own[permute(len(own), key, np.arange(len(own)))]
        self._block = [(self._num_read + i, texts[i]) for i in own.tolist()]
        self._block_size, self._offset = len(texts), 0


class Stream:
    """Takes each document from the source whose tokens lag most behind its weight, and ends when that source ends.

    Streams begin at different points of this cycle. Otherwise all streams would take the long documents of a source at
    the same time: such a source would fill whole batches, and then be absent for many.
    """

    def __init__(self, sources: Sequence[Source], tokenizer: Tokenizer, order: Order, stream: int) -> None:
        self._weights = [source.weight for source in sources]
        self._num_tokens = [0] * len(sources)
        if len(sources) > 1:
            # Each source starts with some tokens to its account, so that its first document is due within
            # mean_tokens / share tokens, the distance from one of its documents to the next.
            for number, source in enumerate(sources):
                others = 1 - source.weight / sum(self._weights)
                self._num_tokens[number] = int(spread(order, stream, number) * source.mean_tokens / others)
        self._cursors: list[Cursor] = [
            ShardedCursor(source, source.data, number, order, stream, tokenizer)
            if isinstance(source.data, ShardedTexts)
            else IndexedCursor(source, source.data, number, order, stream)
            for number, source in enumerate(sources)
        ]

    def next(self) -> tuple[np.ndarray, DocumentRef] | None:
        counts = self._num_tokens
        due = due_source(counts, self._weights)
        document = self._cursors[due].next()
        if document is not None:
            counts[due] += len(document[0])
        return document

    def state(self) -> dict[str, Any]:
        """Only numbers, strings and lists, which JSON and PyTorch's checkpoints return unchanged."""
        return {"num_tokens": list(self._num_tokens), "cursors": [cursor.state() for cursor in self._cursors]}

    def load(self, state: dict[str, Any]) -> None:
        self._num_tokens = list(state["num_tokens"])
        for cursor, cursor_state in zip(self._cursors, state["cursors"], strict=True):
            cursor.load(cursor_state)

    def restart_shares(self, state: dict[str, Any], old_weights: Sequence[float]) -> dict[str, Any]:
        """A state saved with other weights, with the count of tokens restarted. Call this on an unused stream."""
        counts = list(self._num_tokens)
        counts[due_source(state["num_tokens"], old_weights)] = -1  # so the stream first finishes the current document
        return {**state, "num_tokens": counts}


def due_source(num_tokens: Sequence[int], weights: Sequence[float]) -> int:
    """The source whose tokens lag most behind its weight."""
    return min(range(len(weights)), key=lambda i: num_tokens[i] / weights[i])


def spread(order: Order, stream: int, number: int) -> float:
    """A number between 0 and 1. The streams' numbers are evenly spaced, in another order for each source."""
    place = permute(order.num_streams, (order.seed, number), np.array([stream]))
    return float(place[0] + 0.5) / order.num_streams


def sample_mean_tokens(data: Documents | ShardedTexts, tokenizer: Tokenizer, count: int = 32) -> float:
    if isinstance(data, ShardedTexts):
        lengths = [len(tokenizer.encode(text, bos=True, eos=True)) for text in data.open(0, None).read(count)]
    else:
        indices = permute(len(data), 0, np.arange(min(count, len(data)))).tolist()
        lengths = [len(data.tokens(index)) for index in indices]
    return sum(lengths) / max(len(lengths), 1)


def log_epoch(source: Source, epoch: int, order: Order, stream: int) -> None:
    if stream == 0:  # the other streams follow at about the same time
        order_text = "in a new order" if order.shuffle else "in the same order"
        logger.info(f"epoch {epoch + 1} of {source.name} begins, {order_text}")
