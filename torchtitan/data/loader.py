"""Global batches that are the same on every layout: each rank reads its own streams, ahead of the training step.

Slot i of a global batch gets its sequences from stream (i mod num_streams), and each data-parallel rank owns an equal
number of consecutive streams. The saved state has one entry per stream, so a resumed run can give a stream to another
rank.
"""

import functools
import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from torchtitan.config.schema import DataSource
from torchtitan.data.batch import Ahead, Batch, Origin, OwnSlots, Shape, read_ahead
from torchtitan.data.cursor import Order, Source
from torchtitan.data.packing import Packed
from torchtitan.data.stream import Stream, sample_mean_tokens
from torchtitan.data.texts.documents import Documents, allow_open_files
from torchtitan.data.texts.sources import open_source
from torchtitan.data.tokenizers.fingerprint import fingerprint
from torchtitan.data.tokenizers.tokenizer import Tokenizer
from torchtitan.models.spec import IGNORED
from torchtitan.observe.log import logger
from torchtitan.refusal import Refusal

NUM_PREFETCHED = 3  # batches
FEW_DOCUMENTS = 20  # per stream; with fewer, much of the data is still unread when the shortest stream ends


class Loader:
    """Call `next()` from one thread only. `close()` ends the background thread.

    With `any_says_so` (validation: every token, once), which tells whether any rank says True, a rank without data
    gives sequences of ignored labels until no rank has a label left.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        tokenizer: Tokenizer,
        layout: OwnSlots,
        shape: Shape,
        order: Order,
        any_says_so: Callable[[bool], bool] | None = None,
    ) -> None:
        self._sources, self._tokenizer = list(sources), tokenizer
        self._layout, self._shape, self._order, self._any_says_so = layout, shape, order, any_says_so
        self._stop: Callable[[], Any] | None = None
        self.reset()

    def reset(self) -> None:
        """Go back to the first batch."""
        self.close()
        self._states: dict[int, Any] = {}  # empty: the start of the data
        self._before = self._states  # the last batch
        self._ended = False

    def next(self) -> Batch | None:
        """This rank's part of the next global batch, or None where its data has ended.

        Ranks may reach their end one batch apart: all call `end()` when one of them has got None. With padding they
        agree here, and get None together.
        """
        if self._any_says_so is not None:
            return self._next_padded(self._any_says_so)
        ahead = self._take()
        self._before = self._states
        if ahead.batch is None:
            self.close()
        else:
            assert ahead.states is not None
            self._states = ahead.states
        return ahead.batch

    def end(self) -> None:
        """Put the last batch back, which some rank could not fill, and log how much of the data was read."""
        self._states = self._before
        self.close()
        from torchtitan.data.ended import log_end

        log_end(self._sources, self.state_dict()["streams"], self._order.num_streams)

    def _next_padded(self, any_says_so: Callable[[bool], bool]) -> Batch | None:
        ahead = Ahead() if self._ended else self._take()
        self._ended = ahead.batch is None
        if not any_says_so(not self._ended):
            self.close()
            return None
        return ahead.batch or self._padding()

    def close(self) -> None:
        """End the background thread. A later `next()` starts it again, after the last batch that it returned."""
        if self._stop is not None:
            self._stop()
            self._stop = None

    def state_dict(self) -> dict[str, Any]:
        """The place of this rank's streams after the last batch that `next()` returned. A run saves those of all."""
        packer, own_streams = self._shape.packer, self._layout.own_streams
        states = self._states or {s: packer(self._stream(s), 1, 0).state() for s in own_streams}
        return {
            "num_streams": self._layout.num_streams,
            "seed": self._order.seed,
            "shuffle": self._order.shuffle,
            "tokenizer_sha256": self._tokenizer_sha256,
            "sources": [source.data.identity for source in self._sources],
            "weights": [source.weight for source in self._sources],
            # Keys are strings because JSON and PyTorch's checkpoints turn them into strings.
            "streams": {str(stream): stream_state for stream, stream_state in states.items()},
        }

    @functools.cached_property
    def _tokenizer_sha256(self) -> str:
        return fingerprint(self._tokenizer)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take this rank's streams out of the merged state of all ranks, however many ranks there were."""
        from torchtitan.data.saved_state import check_state

        check_state(state, self.state_dict(), [source.name for source in self._sources])
        if state["seed"] != self._order.seed:
            logger.info(
                f"the data keeps the order of seed {state['seed']}; this run's seed, {self._order.seed}, is not used"
            )
            self._order = Order(self._order.num_streams, state["seed"], self._order.shuffle)
        self.reset()
        self._states = {number: state["streams"][str(number)] for number in self._layout.own_streams}
        old, new = weight_shares(state["weights"]), weight_shares([source.weight for source in self._sources])
        if not np.allclose(old, new, rtol=0, atol=1e-8):  # older states hold shares rounded to nine digits
            logger.info(f"the sources' shares change from {old} to {new}")
            for number, saved in self._states.items():
                self._states[number] = self._stream(number).restart_shares(saved, state["weights"])
        self._before = self._states

    def _stream(self, number: int) -> Stream:
        return Stream(self._sources, self._tokenizer, self._order, number)

    def _take(self) -> Ahead:
        if self._stop is None:
            self._queue: queue.Queue[Ahead] = queue.Queue(NUM_PREFETCHED)
            stop = threading.Event()
            packers = {
                number: self._shape.packer(self._stream(number), self._shape.seq_len, self._shape.pad_id)
                for number in self._layout.own_streams
            }
            # The thread holds no reference to the Loader. So a forgotten Loader is collected, which ends its thread.
            args = (packers, dict(self._states), self._layout.own_slots, self._shape, self._sources, self._queue, stop)
            thread = threading.Thread(target=read_ahead, args=args, name="loader", daemon=True)
            self._stop = weakref.finalize(self, end_thread, thread, stop)
            thread.start()
        ahead = self._queue.get()
        if ahead.error is not None:
            self.close()
            raise ahead.error
        return ahead

    def _padding(self) -> Batch:
        slots, shape = self._layout.own_slots, self._shape
        inputs = torch.full((len(slots), shape.seq_len), shape.pad_id, dtype=torch.int64)
        documents = None
        if shape.block_causal:
            from torchtitan.data.documents import document_starts

            documents = torch.from_numpy(document_starts(np.zeros(inputs.shape, np.int32)))
        packed = [Packed(0, None, None)] * len(slots)
        return Batch(inputs, torch.full_like(inputs, IGNORED), documents, Origin(slots, packed, self._sources))


def open_sources(
    given: Sequence[DataSource], tokenizer: Tokenizer, layout: OwnSlots, epochs: int, *, divided: bool, pads: bool
) -> list[Source]:
    """Open the sources; of `divided` ones, only the documents for training, or with padding those for validation."""
    sources = []
    for source in given:
        data = open_source(source.dataset, source.dataset_path, source.text_key, tokenizer)
        if divided and isinstance(data, Documents):
            from torchtitan.data.texts.held_out import Part

            data = Part(data, is_held_out=pads)
        if not isinstance(data, Documents):
            allow_open_files(len(layout.own_streams))  # each stream keeps one of its files open
        name = source.dataset_path or source.dataset
        source_epochs = epochs if source.epochs is None else source.epochs
        mean_tokens = sample_mean_tokens(data, tokenizer) if len(given) > 1 else 0.0
        sources.append(Source(name, data, source.weight, source_epochs, mean_tokens, may_run_short=pads))
        if not pads:  # with padding, a stream without data is no error
            check_size(sources[-1], layout.num_streams)
    return sources


def end_thread(thread: threading.Thread, stop: threading.Event) -> None:
    """Runs at the end of the process, too: a thread that is still inside Arrow would abort the process."""
    stop.set()
    if thread is not threading.current_thread():
        # A thread that waits for the network may take longer. It is a daemon, so it cannot keep the process alive.
        thread.join(timeout=2)


def check_size(source: Source, num_streams: int) -> None:
    if not isinstance(source.data, Documents):
        if (size := source.data.num_shards) < num_streams:
            times = -(-num_streams // size)
            logger.info(
                f"{source.name} has {size} shards for {num_streams} streams, so up to {times} streams read each shard; "
                f"to avoid that, set training.num_streams = {size} or less, or prepare the tokens"
            )
    elif (size := len(source.data)) < num_streams:
        raise Refusal(
            f"{source.name} has {size} documents, fewer than the {num_streams} streams "
            "(training.num_streams); use fewer streams, or split the text into more documents (in JSONL, one per line)"
        )
    elif 0 < size * source.epochs < FEW_DOCUMENTS * num_streams:
        logger.info(
            f"{source.name} has {size} documents for {num_streams} streams, {size * source.epochs / num_streams:.1f} "
            "each. The run ends with its shortest stream, so much of the data may stay unread; set "
            "training.num_streams lower, split long documents, or raise training.epochs"
        )


def weight_shares(weights: Sequence[float]) -> list[float]:
    return [round(weight / sum(weights), 9) for weight in weights]
