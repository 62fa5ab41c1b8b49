"""Samples of any dataset in the streams of the recipe: batches do not depend on the ranks, and resume anywhere."""

import functools
import inspect
import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from torchtitan.data.batch import OwnSlots
from torchtitan.data.cursor import Order
from torchtitan.data.draws import seed_draws
from torchtitan.data.permutation import permute
from torchtitan.data.texts.held_out import Part
from torchtitan.models.spec import ModelSpec
from torchtitan.refusal import Refusal, blaming


@dataclass(frozen=True)
class SampleOrigin:
    """Which samples a batch holds."""

    slots: list[int]
    indices: list[int]

    def describe(self) -> str:
        return "\n".join(f"slot {s}: sample {i}" for s, i in zip(self.slots, self.indices, strict=False))


class LocalBatch(NamedTuple):
    """Samples that go through the model together, collated."""

    inputs: Any
    targets: Any
    valid: int  # samples that count; a pipeline's last one is filled up, and all ranks run as many


@dataclass(frozen=True)
class SampleBatch:
    """One rank's samples of a global batch, in slot order."""

    parts: list[LocalBatch]
    origin: SampleOrigin

    def to(self, device: torch.device) -> "SampleBatch":
        def move(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            pins = device.type == "cuda" and value.device.type == "cpu" and value.layout == torch.strided
            return (value.pin_memory() if pins else value).to(device, non_blocking=True)

        return SampleBatch(tree_map(move, self.parts), self.origin)


class Numbered:
    """A map-style dataset as documents that `Part` divides: a document is the number of a sample."""

    def __init__(self, dataset: Any, identity: str) -> None:
        self.dataset, self.identity = dataset, identity

    def __len__(self) -> int:
        return len(self.dataset)


def open_dataset(data: Any, split: str) -> tuple[Any, bool]:
    """The dataset, and whether it is the part for this split. Otherwise it is all there is, and must be divided.

    What `data` draws is the same on each call, so that all ranks, all runs and both splits see one dataset.
    """
    is_part = callable(data) and "split" in inspect.signature(data).parameters
    with blaming("data of the ModelSpec"), own_draws("data"):
        dataset = data if not callable(data) else data(split=split) if is_part else data()
    if not hasattr(dataset, "__getitem__") and not isinstance(dataset, IterableDataset):
        raise Refusal(
            f"data of the ModelSpec gives {type(dataset).__name__}; give a torch.utils.data.Dataset of (inputs, target)"
        )
    return dataset, is_part


@contextmanager
def own_draws(key: str) -> Iterator[None]:
    """Inside, random numbers depend on the key; afterwards the host's generators go on as if nothing had been drawn."""
    before = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        seed_draws(key)
        try:
            yield
        finally:
            random.setstate(before[0])
            np.random.set_state(before[1])


class Fetch(Dataset[Any]):
    """Reads samples by (epoch, index); their random numbers depend on nothing else."""

    def __init__(self, dataset: Any, seed: int, is_random: bool) -> None:
        self._dataset, self._seed, self._is_random = dataset, seed, is_random

    def __getitems__(self, places: list[tuple[int, int]]) -> list[Any]:
        at_once = getattr(self._dataset, "__getitems__", None)
        if at_once is None or self._is_random:
            return [self[place] for place in places]
        return list(at_once([index for _, index in places]))

    def __getitem__(self, place: tuple[int, int]) -> Any:
        if not self._is_random:
            return self._dataset[place[1]]
        with own_draws(f"{self._seed} {place}"):
            return self._dataset[place[1]]


class SampleLoader:
    """The same as data.loader.Loader, for samples. `pads`: every sample once, then what is left."""

    def __init__(
        self,
        dataset: Any,
        layout: OwnSlots,
        order: Order,
        *,
        local_batch_size: int,
        fills: bool = False,
        epochs: int,
        pads: bool,
        held_out: bool | None,
        workers: int,
        is_random: bool,
        any_says_so: Callable[[bool], bool] | None = None,
        collate: Callable[[Sequence[Any]], tuple[Any, Any]] | None = None,
        grouping: Any = None,
    ) -> None:
        """`held_out`: only the part for validation (True), only the rest (False), or everything (None).

        `fills`: each part of a batch is whole, as a pipeline needs it; its last sample repeats.
        """
        self._layout, self._order, self._epochs, self._pads = layout, order, epochs, pads
        self._any_says_so, self._workers, self._is_random = any_says_so, workers, is_random
        self._grouping, slots = grouping, len(layout.own_slots)
        self._collate = functools.partial(_in_parts, collate or default_pairs, slots, local_batch_size, fills)
        self._dataset, self._is_stream = dataset, isinstance(dataset, IterableDataset)
        if self._is_stream:
            if held_out is not None:
                raise Refusal(
                    "an iterable dataset cannot be divided: let data take `split`, or set validation.enable = false"
                )
            self._identity = f"{type(dataset).__name__}, a stream"
        else:
            numbers: Any = Numbered(dataset, f"{len(dataset):,} samples of {type(dataset).__name__}")
            self._numbers = numbers if held_out is None else Part(numbers, held_out)
            self._identity = self._numbers.identity
            self._length, self._orders = len(self._numbers), cast(dict[int, list[int]], {})
            if grouping is not None:
                self._identity, self._length = f"{self._identity}, {grouping.identity}", grouping.whole(self._length)
            if self._length < order.num_streams and not pads:
                raise Refusal(
                    f"the dataset has {self._length} samples, fewer than the {order.num_streams} streams "
                    "(training.num_streams); lower training.global_batch_size"
                )
        self._iterator: Iterator[Any] | None = None
        self.reset()

    def reset(self) -> None:
        self.close()
        self._states: dict[int, list[int]] = dict.fromkeys(self._layout.own_streams, [0, 0])
        self._before = self._states
        self._ended = False

    def close(self) -> None:
        self._iterator = None

    def next(self) -> SampleBatch | None:
        """This rank's part of the next global batch, or None where the data has ended."""
        batch = None if self._ended else self._take()
        if self._any_says_so is None:
            return batch
        self._ended = batch is None
        return (batch or self._filler()) if self._any_says_so(not self._ended) else None

    def _filler(self) -> SampleBatch:
        """A batch that does not count, for a rank whose data has ended before the others'."""
        parts = [part._replace(valid=0) for part in self._collate([next(iter(self._dataset))])]
        return SampleBatch(parts, SampleOrigin(self._layout.own_slots, []))

    def end(self) -> None:
        """Put the last batch back, which some rank could not fill."""
        self._states = self._before
        self.close()

    def state_dict(self) -> dict[str, Any]:
        return {
            "num_streams": self._order.num_streams,
            "seed": self._order.seed,
            "shuffle": self._order.shuffle,
            "tokenizer_sha256": "",
            "sources": [self._identity],
            "weights": [1.0],
            "streams": {str(stream): {"cursors": [state]} for stream, state in self._states.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        from torchtitan.data.saved_state import check_state

        check_state(state, self.state_dict(), [self._identity])
        self._order, self._orders = Order(self._order.num_streams, state["seed"], self._order.shuffle), {}
        self.reset()
        self._states = {n: list(state["streams"][str(n)]["cursors"][0]) for n in self._layout.own_streams}
        self._before = self._states

    def _take(self) -> SampleBatch | None:
        if self._iterator is None:
            self._planned: deque[tuple[list[int], dict[int, list[int]]]] = deque()
            self._iterator = self._stream() if self._is_stream else self._indexed()
        self._before = self._states
        taken = next(self._iterator, None)
        if taken is None:
            return None
        indices, self._states = self._planned.popleft()
        return SampleBatch(taken, SampleOrigin(self._layout.own_slots, indices))

    def _indexed(self) -> Iterator[Any]:
        fetch = Fetch(self._dataset, self._order.seed, self._is_random)
        # Worker processes read ahead, so a batch's state is noted when it is planned and taken when it is delivered.
        return iter(DataLoader(fetch, batch_sampler=self._plan(), num_workers=self._workers, collate_fn=self._collate))

    def _plan(self) -> Iterator[list[tuple[int, int]]]:
        """The samples of one batch after another."""
        places = {stream: tuple(state) for stream, state in self._states.items()}
        num_slots = len(self._layout.own_slots)
        while True:
            samples: list[tuple[int, int]] = []
            for _ in range(num_slots // len(places)):
                samples += self._round(places)
            if len(samples) < num_slots and not (self._pads and samples):
                return
            self._planned.append(([i for _, i in samples], {stream: list(place) for stream, place in places.items()}))
            yield samples

    def _round(self, places: dict[int, tuple[int, ...]]) -> list[tuple[int, int]]:
        """A sample of each stream that has one left."""
        samples, count = [], self._order.num_streams
        for stream, (epoch, position) in places.items():
            place = stream + position * count
            if place >= self._length:
                epoch, position, place = epoch + 1, 0, stream
            if place < self._length and not 0 <= self._epochs <= epoch:
                order = self._orders.get(epoch)
                samples.append((epoch, (self._order_of(epoch) if order is None else order)[place]))
                places[stream] = epoch, position + 1
        return samples

    def _order_of(self, epoch: int) -> list[int]:
        """All samples in the epoch's order; stream s reads every n-th of them from the s-th on."""
        count, seed = len(self._numbers), (self._order.seed, 0, epoch)
        order = np.arange(count)
        if self._order.shuffle:
            order = permute(count, seed, order)
        order = order[: self._length]
        if isinstance(self._numbers, Part):
            order = np.array([self._numbers.index(index) for index in order.tolist()])
        if self._grouping is not None:
            order = self._grouping(order, seed)
        indices: list[int] = order.tolist()
        self._orders = {e: o for e, o in self._orders.items() if e >= epoch - 1} | {epoch: indices}
        return indices

    def _stream(self) -> Iterator[Any]:
        """Every rank reads the whole stream and keeps its own slots."""
        epoch, read = next(iter(self._states.values()))
        size, own = self._layout.global_batch_size, self._layout.own_slots
        while self._epochs < 0 or epoch < self._epochs:
            samples = islice(iter(self._dataset), read, None)
            while len(items := list(islice(samples, size))) == size or (self._pads and len(items) > own[0]):
                kept = [items[slot] for slot in own if slot < len(items)]
                read += len(items)
                place = dict.fromkeys(self._layout.own_streams, [epoch, read])
                self._planned.append(([read - len(items) + slot for slot in own], place))
                yield self._collate(kept)
            epoch, read = epoch + 1, 0


def _in_parts(
    collate: Callable[[Sequence[Any]], tuple[Any, Any]], slots: int, size: int, fills: bool, samples: Sequence[Any]
) -> list[LocalBatch]:
    """A rank's samples as local batches. So many are made whether or not there are samples for all of them."""
    parts = []
    for begin in range(0, slots, size):
        own = list(samples[begin : begin + size])
        missing = min(size, slots - begin) - len(own) if fills else not own
        parts.append(LocalBatch(*collate(own + [samples[-1]] * missing), len(own)))
    return parts


def collate_of(spec: ModelSpec) -> Callable[[Sequence[Any]], tuple[Any, Any]]:
    """One that returns a dictionary with labels, as those of transformers do, is taken apart."""
    return default_pairs if spec.collate is None else functools.partial(_collated, spec.collate)


def _collated(collate: Callable[[Sequence[Any]], Any], samples: Sequence[Any]) -> tuple[Any, Any]:
    return _pair(collate(samples), "collate of the ModelSpec")


def default_pairs(samples: Sequence[Any]) -> tuple[Any, Any]:
    """A batch of pairs, or of dictionaries that hold the target as `labels` or `label`, as datasets' do."""
    inputs, targets = default_collate([_pair(sample) for sample in samples])
    return inputs, targets


def _pair(sample: Any, giver: str = "the dataset") -> tuple[Any, Any]:
    if isinstance(sample, Mapping) and (named := [key for key in ("labels", "label") if key in sample]):
        return {key: value for key, value in sample.items() if key != named[0]}, sample[named[0]]
    if isinstance(sample, tuple | list) and len(sample) == 2:
        return sample[0], sample[1]
    said = f"a dictionary of {', '.join(map(str, sample))}" if isinstance(sample, Mapping) else type(sample).__name__
    raise Refusal(
        f"a sample is (inputs, target), or a dictionary with labels, but {giver} gave {said}; return a pair, or "
        "give the ModelSpec collate = ..., a function of samples that returns (inputs, target)"
    )
