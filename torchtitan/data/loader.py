"""Global batches that do not know the layout: each rank reads its own streams, ahead of the training step.

Slot i of a global batch is served by stream i mod num_streams; rank r of dp owns an equal run of consecutive streams.
What ends on one rank ends on all of them; states are saved a stream, so that they can be handed to other ranks.
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
from torchtitan.data.batch import Ahead, Batch, Layout, Origin, Shape, read_ahead
from torchtitan.data.documents import allow_open_files
from torchtitan.data.packing import IGNORED_LABEL, Packed, Packer
from torchtitan.data.prepared import fingerprint
from torchtitan.data.sharded import ShardedTexts
from torchtitan.data.sources import open_source
from torchtitan.data.stream import Order, Source, Stream, due_source, sample_mean_tokens
from torchtitan.data.tokenizer import Tokenizer
from torchtitan.observe.log import logger
from torchtitan.refusal import Refusal

NUM_PREFETCHED = 3
FEW_DOCUMENTS = 20  # a stream, below which a good part of the data is left over when the shortest stream ends


class Loader:
    """Iterate with `next()`, from one thread. `close()` ends the background thread."""

    def __init__(
        self,
        sources: list[Source],
        tokenizer: Tokenizer,
        layout: Layout,
        shape: Shape,
        order: Order,
        any_says_so: Callable[[bool], bool] | None = None,
    ) -> None:
        self._sources, self._tokenizer = sources, tokenizer
        self._layout, self._shape, self._order, self._any_says_so = layout, shape, order, any_says_so
        self._stop: Callable[[], Any] | None = None
        self.reset()

    def reset(self) -> None:
        """Back to the first batch."""
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
        log_end(self._sources, self.state_dict()["streams"], self._order.num_streams)

    def _next_padded(self, any_says_so: Callable[[bool], bool]) -> Batch | None:
        ahead = Ahead() if self._ended else self._take()
        self._ended = ahead.batch is None
        if not any_says_so(not self._ended):
            self.close()
            return None
        return ahead.batch or self._padding()

    def close(self) -> None:
        """The background thread ends; a later `next()` starts it again, after the last batch that was returned."""
        if self._stop is not None:
            self._stop()
            self._stop = None

    def state_dict(self) -> dict[str, Any]:
        """The place after the last batch `next()` returned, of this rank's streams; those of all ranks make a run's."""
        states = self._states or {s: Packer(self._stream(s), 1, 0).state() for s in self._layout.own_streams}
        return {
            "num_streams": self._layout.num_streams,
            "seed": self._order.seed,
            "shuffle": self._order.shuffle,
            "tokenizer_sha256": self._tokenizer_sha256,
            "sources": [source.data.identity for source in self._sources],
            "weights": [source.weight for source in self._sources],
            # As strings: what JSON and PyTorch's checkpoints make of the keys of a dictionary.
            "streams": {str(stream): stream_state for stream, stream_state in states.items()},
        }

    @functools.cached_property
    def _tokenizer_sha256(self) -> str:
        return fingerprint(self._tokenizer)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes this rank's streams out of the merged state of all ranks, whatever their number was."""
        check_state(state, self.state_dict(), [source.name for source in self._sources])
        if state["seed"] != self._order.seed:
            logger.info(f"the data order goes on as drawn from seed {state['seed']}, not {self._order.seed}")
            self._order = Order(self._order.num_streams, state["seed"], self._order.shuffle)
        self.reset()
        self._states = {number: state["streams"][str(number)] for number in self._layout.own_streams}
        old, new = weight_shares(state["weights"]), weight_shares([source.weight for source in self._sources])
        if not np.allclose(old, new, rtol=0, atol=1e-8):  # older states hold shares of nine digits
            logger.info(f"the sources' shares are {new} from here on; they were {old}")
            for number, saved in self._states.items():
                self._states[number] = self._stream(number).restart_shares(saved, state["weights"])

    def _stream(self, number: int) -> Stream:
        return Stream(self._sources, self._tokenizer, self._order, number)

    def _take(self) -> Ahead:
        if self._stop is None:
            self._queue: queue.Queue[Ahead] = queue.Queue(NUM_PREFETCHED)
            stop = threading.Event()
            packers = {
                number: Packer(self._stream(number), self._shape.seq_len, self._shape.pad_id)
                for number in self._layout.own_streams
            }
            # The thread knows no Loader, so that one nobody holds any more is collected and its thread ends.
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
        ids = torch.zeros(inputs.shape, dtype=torch.int32) if shape.block_causal else None
        packed = [Packed(0, None, None)] * len(slots)
        return Batch(inputs, torch.full_like(inputs, IGNORED_LABEL), ids, Origin(slots, packed, self._sources))


def build_loader(
    sources: Sequence[DataSource],
    tokenizer: Tokenizer,
    *,
    seq_len: int,
    global_batch_size: int,
    num_streams: int,
    dp_rank: int,
    dp_size: int,
    seed: int,
    epochs: int,
    shuffle: bool,
    block_causal: bool,
    pin_memory: bool = False,
    any_says_so: Callable[[bool], bool] | None = None,
) -> Loader:
    """This rank's streams of the sources.

    With `any_says_so` (validation: every token, once), which tells whether any rank says True, a rank without data
    gives sequences of ignored labels until no rank has a label left.
    """
    pads = any_says_so is not None
    assert global_batch_size % num_streams == 0 and num_streams % dp_size == 0, "see config.layout.plan_batch"
    opened = []
    for source in sources:
        data = open_source(source.dataset, source.dataset_path, source.text_key, tokenizer)
        if isinstance(data, ShardedTexts):
            allow_open_files(num_streams // dp_size)  # each stream has one of it open
        name = source.dataset_path or source.dataset
        source_epochs = epochs if source.epochs is None else source.epochs
        mean_tokens = sample_mean_tokens(data, tokenizer) if len(sources) > 1 else 0.0
        opened.append(Source(name, data, source.weight, source_epochs, mean_tokens, may_run_short=pads))
        if not pads:  # a stream without data is padding there
            check_size(opened[-1], num_streams)
    return Loader(
        opened,
        tokenizer,
        Layout(global_batch_size, num_streams, dp_rank, dp_size),
        Shape(seq_len, tokenizer.eos_id, block_causal, pin_memory, pads),
        Order(num_streams, seed, shuffle),
        any_says_so,
    )


def end_thread(thread: threading.Thread, stop: threading.Event) -> None:
    """Also at the end of the process: a thread that is still inside of Arrow then would abort it."""
    stop.set()
    if thread is not threading.current_thread():
        # One that waits for the network may take longer; it ends on its own, and never holds the process.
        thread.join(timeout=2)


def check_size(source: Source, num_streams: int) -> None:
    if isinstance(source.data, ShardedTexts):
        if (size := source.data.num_shards) < num_streams:
            times = -(-num_streams // size)
            logger.info(
                f"{source.name} has {size} shards for {num_streams} streams, so each is read up to {times} times; "
                f"training.num_streams = {size} or less, or prepared tokens, avoid it"
            )
    elif (size := len(source.data)) < num_streams:
        raise Refusal(
            f"{source.name} has {size} documents, fewer than the {num_streams} streams "
            "(training.num_streams); use fewer streams, or split the text into more documents (JSONL: one a line)"
        )
    elif 0 < size * source.epochs < FEW_DOCUMENTS * num_streams:
        logger.info(
            f"{source.name} has {size} documents for {num_streams} streams, {size * source.epochs / num_streams:.1f} "
            "each, and the run ends with the shortest stream, so much of it may stay unread; set training.num_streams "
            "lower, split long documents, or raise training.epochs"
        )


def check_state(state: dict[str, Any], own: dict[str, Any], names: Sequence[str]) -> None:
    """Refuse a saved state of other data than this rank reads; `own` is its own state, of any place in the data."""
    if state["num_streams"] != own["num_streams"]:
        raise Refusal(
            f"the saved data state has {state['num_streams']} streams, this run {own['num_streams']}; "
            f"set training.num_streams = {state['num_streams']}"
        )
    if state["shuffle"] != own["shuffle"]:
        raise Refusal(
            f"the saved data state has training.shuffle = {state['shuffle']}, this run {own['shuffle']}; set it back"
        )
    if state["tokenizer_sha256"] != own["tokenizer_sha256"]:
        raise Refusal(
            "the saved data state is of another tokenizer; set model.hf_assets_path to the one the run began with"
        )
    if len(state["sources"]) != len(own["sources"]):
        raise Refusal(
            f"the saved data state has {len(state['sources'])} sources, this run {len(own['sources'])}: "
            f"{', '.join(names)}; resume with the same sources"
        )
    for name, saved, found in zip(names, state["sources"], own["sources"], strict=True):
        if saved != found:
            raise Refusal(
                f"{name} has {found}, and the saved data state is of {saved} there; resume with the same data"
            )
    if missing := [number for number in own["streams"] if number not in state["streams"]]:
        raise Refusal(f"the saved data state lacks streams {', '.join(missing[:8])}; go on from another checkpoint")


def log_end(sources: Sequence[Source], states: dict[str, dict[str, Any]], num_streams: int) -> None:
    """How much of the data was read when the shortest stream ended; rank 0 says it, of its own streams."""
    weights = [source.weight for source in sources]
    for number, source in enumerate(sources):
        if isinstance(source.data, ShardedTexts) or source.epochs < 0:
            continue  # how long a stream of it would be is not known
        total = read = in_part = 0
        for stream, state in states.items():
            length = len(range(int(stream), len(source.data), num_streams))
            epoch, position = state["cursors"][number]
            total += length * source.epochs
            read += length * epoch + position
            in_part += state["offset"] > 0 and due_source(state["num_tokens"], weights) == number
        logger.info(
            f"the data has ended: of {total:,} documents of {source.name} in {len(states)} streams, {read:,} were read "
            f"to the end ({read / total:.0%}) and {in_part:,} in part"
        )


def weight_shares(weights: Sequence[float]) -> list[float]:
    return [round(weight / sum(weights), 9) for weight in weights]
