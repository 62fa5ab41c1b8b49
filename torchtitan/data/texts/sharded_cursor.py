"""A stream's place in a source that can only be read forwards."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from torchtitan.data.cursor import DocumentRef, Order, Source, log_epoch
from torchtitan.data.permutation import permute
from torchtitan.data.texts.sharded import ShardedTexts, ShardReader
from torchtitan.data.tokenizers.tokenizer import Tokenizer
from torchtitan.refusal import Refusal

SHUFFLE_BLOCK = 512  # a stream shuffles a shard within blocks of this many documents, which it holds as text


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
        self._tokenizer = data.encoder or tokenizer
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
