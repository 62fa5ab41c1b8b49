"""Batches of samples of like length, so that little of a batch is padding."""

import time
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, IterableDataset

from torchtitan.models.spec import ModelSpec
from torchtitan.observe.log import logger
from torchtitan.own_model.samples import Fetch
from torchtitan.refusal import Refusal, blaming

WINDOW = 50  # batches whose samples are sorted together


class Grouping:
    """Sorts windows of an epoch's order by length, and shuffles the batches of each."""

    def __init__(self, lengths: np.ndarray, batch_size: int) -> None:
        self.lengths, self.batch_size = lengths, batch_size
        self.identity = f"grouped by lengths {zlib.crc32(lengths.tobytes()):08x}"

    def whole(self, num_samples: int) -> int:
        """The samples of an epoch: those of its whole batches, because one between two epochs would mix lengths."""
        if num_samples < self.batch_size:
            raise Refusal(
                f"the dataset has {num_samples} samples, fewer than the {self.batch_size} of a global batch, and "
                "`length` of the ModelSpec groups whole batches; leave it out"
            )
        return num_samples // self.batch_size * self.batch_size

    def __call__(self, order: np.ndarray, seed: tuple[int, ...]) -> np.ndarray:
        draws, size = np.random.default_rng(seed), WINDOW * self.batch_size
        windows = (order[begin : begin + size] for begin in range(0, len(order), size))
        batches = (w[np.argsort(self.lengths[w], kind="stable")].reshape(-1, self.batch_size) for w in windows)
        return np.concatenate([draws.permutation(each).ravel() for each in batches])


def read_lengths(dataset: Any, spec: ModelSpec) -> np.ndarray:
    """Of all samples, each of which is read once."""
    if isinstance(dataset, IterableDataset):
        raise Refusal("`length` of the ModelSpec groups samples by number, and an iterable dataset has none; remove it")
    assert spec.length is not None
    begun, count = time.perf_counter(), len(dataset)
    places = [[(0, i) for i in range(begin, min(begin + 256, count))] for begin in range(0, count, 256)]
    fetch = Fetch(dataset, 0, spec.data_is_random)
    with blaming("length of the ModelSpec"):
        read = DataLoader(
            fetch, batch_sampler=places, num_workers=spec.data_workers, collate_fn=partial(_of_each, spec.length)
        )
        lengths = np.array([length for some in read for length in some], dtype=np.int64)
    logger.info(
        f"batches of like length: {count:,} samples of {lengths.min():,} to {lengths.max():,}, read in "
        f"{time.perf_counter() - begun:.1f} s"
    )
    return lengths


def _of_each(length: Callable[[Any], int], samples: Sequence[Any]) -> list[int]:
    return [int(length(sample)) for sample in samples]
