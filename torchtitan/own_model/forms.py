"""The sizes of what travels between pipeline stages, as they follow from the sizes of a batch's inputs."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from torchtitan.refusal import Refusal

Sizes = tuple[tuple[int, ...], ...]  # of the tensors in a batch's inputs, in order
Kind = tuple[torch.Size, torch.dtype, bool]  # of one tensor: its size, its type, whether it has a gradient


@dataclass(frozen=True)
class Size:
    """One size of a tensor: a factor times sizes of the inputs."""

    factor: int
    of: tuple[tuple[int, int], ...] = ()  # which tensor of the inputs, and which of its sizes

    def __call__(self, inputs: Sizes) -> int:
        return self.factor * math.prod(inputs[tensor][dim] for tensor, dim in self.of)

    def __str__(self) -> str:
        names = ["samples" if place == (0, 0) else f"size {place[1]} of input {place[0]}" for place in self.of]
        return " x ".join(names if names and self.factor == 1 else [str(self.factor), *names])


@dataclass(frozen=True)
class Form:
    """The sizes and type of a value, for any batch."""

    sizes: tuple[Size, ...]
    dtype: torch.dtype
    requires_grad: bool

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} [{', '.join(map(str, self.sizes))}]"

    def shape(self, inputs: Sizes) -> tuple[int, ...]:
        return tuple(size(inputs) for size in self.sizes)

    def zeros(self, inputs: Sizes, device: torch.device | str) -> Tensor:
        return torch.zeros(self.shape(inputs), dtype=self.dtype, device=device)


def sizes_of(inputs: object) -> Sizes:
    return tuple(tuple(leaf.shape) for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor))


def form_of(name: str, kinds: Sequence[Kind], inputs: Sequence[Sizes]) -> Form:
    """The form of a value that was of these kinds for batches with these sizes."""
    varying = [
        (tensor, dim)
        for tensor, sizes in enumerate(inputs[0])
        for dim in range(len(sizes))
        if len({batch[tensor][dim] for batch in inputs}) > 1
    ]
    of_each = [(), *((place,) for place in varying), *itertools.combinations(varying, 2)]
    if len({len(size) for size, _, _ in kinds}) > 1:
        raise _unknown(name, kinds, inputs)
    found = []
    for seen in zip(*(size for size, _, _ in kinds), strict=True):
        tried = (Size(seen[0] // max(1, Size(1, of)(inputs[0])), of) for of in of_each)
        size = next((size for size in tried if all(size(b) == s for b, s in zip(inputs, seen, strict=True))), None)
        if size is None:
            raise _unknown(name, kinds, inputs)
        found.append(size)
    return Form(tuple(found), *kinds[0][1:])


def _unknown(name: str, kinds: Sequence[Kind], inputs: Sequence[Sizes]) -> Refusal:
    other = max(number for number, kind in enumerate(kinds) if kind[0] != kinds[0][0])
    return Refusal(
        f"what {name} gives has the size {list(kinds[0][0])} for inputs of {_listed(inputs[0])}, and "
        f"{list(kinds[other][0])} for {_listed(inputs[other])}, so a pipeline cannot know it before; let "
        "collate pad to one length, or use parallelism.pipeline_parallel_degree = 1"
    )


def _listed(sizes: Sizes) -> str:
    return " and ".join(str(list(size)) for size in sizes)
