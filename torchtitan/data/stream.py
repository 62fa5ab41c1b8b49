"""A stream of documents. It has its own part of every source, its own order, and a position small enough to save.

Which documents a stream reads depends on the data, the seed and the number of streams, but never on the ranks.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from torchtitan.data.cursor import Cursor, DocumentRef, IndexedCursor, Order, Source
from torchtitan.data.permutation import permute
from torchtitan.data.texts.documents import Documents
from torchtitan.data.tokenizers.tokenizer import Tokenizer

if TYPE_CHECKING:
    from torchtitan.data.texts.sharded import ShardedTexts


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
        self.cursors = [_cursor(source, number, order, stream, tokenizer) for number, source in enumerate(sources)]

    def next(self) -> tuple[np.ndarray, DocumentRef] | None:
        counts = self._num_tokens
        due = due_source(counts, self._weights)
        document = self.cursors[due].next()
        if document is not None:
            counts[due] += len(document[0])
        return document

    def state(self) -> dict[str, Any]:
        """Only numbers, strings and lists, which JSON and PyTorch's checkpoints return unchanged."""
        return {"num_tokens": list(self._num_tokens), "cursors": [cursor.state() for cursor in self.cursors]}

    def load(self, state: dict[str, Any]) -> None:
        self._num_tokens = list(state["num_tokens"])
        for cursor, cursor_state in zip(self.cursors, state["cursors"], strict=True):
            cursor.load(cursor_state)

    def restart_shares(self, state: dict[str, Any], old_weights: Sequence[float]) -> dict[str, Any]:
        """A state saved with other weights, with the count of tokens restarted. Call this on an unused stream."""
        counts = list(self._num_tokens)
        counts[due_source(state["num_tokens"], old_weights)] = -1  # so the stream first finishes the current document
        return {**state, "num_tokens": counts}


def _cursor(source: Source, number: int, order: Order, stream: int, tokenizer: Tokenizer) -> Cursor:
    if not isinstance(source.data, Documents):
        from torchtitan.data.texts.sharded_cursor import ShardedCursor

        return ShardedCursor(source, source.data, number, order, stream, tokenizer)
    return IndexedCursor(source, source.data, number, order, stream)


def due_source(num_tokens: Sequence[int], weights: Sequence[float]) -> int:
    """The source whose tokens lag most behind its weight."""
    return min(range(len(weights)), key=lambda i: num_tokens[i] / weights[i])


def spread(order: Order, stream: int, number: int) -> float:
    """A number between 0 and 1. The streams' numbers are evenly spaced, in another order for each source."""
    place = permute(order.num_streams, (order.seed, number), np.array([stream]))
    return float(place[0] + 0.5) / order.num_streams


def sample_mean_tokens(data: "Documents | ShardedTexts", tokenizer: Tokenizer, count: int = 32) -> float:
    if not isinstance(data, Documents):
        encode = (data.encoder or tokenizer).encode
        lengths = [len(encode(text, bos=True, eos=True)) for text in data.open(0, None).read(count)]
    else:
        indices = permute(len(data), 0, np.arange(min(count, len(data)))).tolist()
        lengths = [len(data.tokens(index)) for index in indices]
    return sum(lengths) / max(len(lengths), 1)
