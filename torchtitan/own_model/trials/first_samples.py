"""Reads the first samples: does the dataset draw unseeded, is it the same on all ranks, and how do sizes vary?"""

import hashlib
import random
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import IterableDataset

from torchtitan.models.spec import ModelSpec
from torchtitan.own_model.forms import sizes_of
from torchtitan.own_model.samples import Fetch, collate_of, own_draws
from torchtitan.refusal import Refusal

LOOKED_AT = 64  # samples, to find out how sizes vary


def first_samples(dataset: Any, is_seeded: bool) -> list[Any]:
    """The first sample and up to seven from all over the dataset; of a stream the first eight.

    Refuses a dataset that gives other values when a sample is read again.
    """
    is_stream = isinstance(dataset, IterableDataset)
    with own_draws("one reading"):
        before, samples = states(), _read(dataset, is_seeded, 8)
        draws, read = states() != before, _digest(samples)  # at once: a dataset may write into what it gives
    if not samples:
        raise Refusal(f"the dataset, a {type(dataset).__name__}, has no samples; correct the `data` of the ModelSpec")
    with own_draws("another reading"):
        again = _read(dataset, is_seeded, 8)
    if read == _digest(again):
        return samples
    what = "draws random numbers when it reads a sample"
    fix = "set data_is_random = True in the ModelSpec, which seeds them by epoch and sample"
    if not draws:
        what = "gives other values when a sample is read again, as one does that draws from a generator of its own"
        fix = f"draw with torch, random or np.random themselves, and {fix}"
    if is_stream:
        fix = "seed them in its __iter__, because each rank reads the whole stream"
    raise Refusal(f"the dataset ({type(dataset).__name__}) {what}, so no two runs would train on the same; {fix}")


def _read(dataset: Any, is_seeded: bool, count: int) -> list[Any]:
    if isinstance(dataset, IterableDataset):
        return list(islice(iter(dataset), count))
    fetch, last = Fetch(dataset, 0, is_seeded), len(dataset) - 1
    count = min(count, last + 1)
    return [fetch[0, place * last // max(1, count - 1)] for place in range(count)]


def fingerprint(dataset: Any, is_seeded: bool) -> str:
    """The size of a dataset, and a checksum of a few samples."""
    size = "a stream" if isinstance(dataset, IterableDataset) else f"{len(dataset):,} samples"
    with own_draws("a fingerprint"):
        return f"{size} (checksum of three of them {_digest(_read(dataset, is_seeded, 3))})"


def check_alike(fingerprints: Sequence[str | None]) -> None:
    """None: a rank that reads no data."""
    known = {rank: each for rank, each in enumerate(fingerprints) if each is not None}
    first = next(iter(known))
    if other := next((rank for rank in known if known[rank] != known[first]), None):
        raise Refusal(
            f"data of the ModelSpec is not the same on all ranks: rank {first} has {known[first]}, and rank {other} "
            f"{known[other]}; give data as a function, and draw in it with torch, random or np.random, which the run "
            "seeds, not when the file is imported and not with a generator that nothing seeds"
        )


def batches_of_many_sizes(dataset: Any, samples: Sequence[Any], spec: ModelSpec) -> list[tuple[Any, Any]]:
    """A batch of two samples, one of three, and, where collate pads, up to three more whose inputs have other sizes."""
    collate, several = collate_of(spec), [samples[0], samples[-1], samples[0]]
    batches = [collate(several[:count]) for count in (2, 3)]
    if spec.collate is None:
        return batches
    with own_draws("sizes"):
        if isinstance(dataset, IterableDataset):
            others = list(islice(iter(dataset), LOOKED_AT))
        else:
            others = [dataset[index] for index in range(0, len(dataset), 1 + len(dataset) // LOOKED_AT)]
    for sample in others:
        if all(sizes_of(collate([sample, sample])[0]) != sizes_of(inputs) for inputs, _ in batches):
            batches.append(collate([sample, sample]))
    return batches[:5]


def check_collate(collate: Callable[[Sequence[Any]], Any], samples: Sequence[Any]) -> None:
    with own_draws("a batch"):
        before = states()
        collate(samples)
        if states() != before:
            raise Refusal(
                "collate of the ModelSpec draws random numbers, which nothing seeds, so no two runs would train on the "
                "same; draw in the dataset, or mix samples in a step"
            )


def _digest(value: Any) -> str:
    """A checksum of what a sample holds; objects of other kinds count by their type."""
    found = hashlib.sha256()
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor) and leaf.layout == torch.strided:
            found.update(f"{leaf.dtype} {list(leaf.shape)} ".encode())
            leaf = leaf.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
        elif hasattr(leaf, "tobytes") and not getattr(getattr(leaf, "dtype", None), "hasobject", False):  # as an image
            leaf = leaf.tobytes()
        elif not isinstance(leaf, bytes):
            plain = isinstance(leaf, bool | int | float | str | None)
            leaf = (repr(leaf) if plain else type(leaf).__name__).encode()
        found.update(leaf)
        found.update(b" ")
    return found.hexdigest()[:16]


def states() -> tuple[Any, ...]:
    """The state of each generator on the host."""
    of_numpy = np.random.get_state(legacy=False)["state"]
    return random.getstate(), of_numpy["key"].tobytes(), of_numpy["pos"], torch.get_rng_state().numpy().tobytes()
