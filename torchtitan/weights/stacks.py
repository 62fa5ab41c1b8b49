"""Tensors that are one here and many elsewhere: a name with `*` stands for those with 0, 1, 2, ... in its place."""

import re
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from torchtitan.parallel.parts import copy_part
from torchtitan.weights.tensors import Weights

MANY = "*"


def stacked(weights: Weights, names: Iterable[str]) -> Weights:
    """The weights with one tensor for each of these names that has a `*`; a rank reads only the members it has."""
    members = {name: _members(name, weights.outline) for name in names if MANY in name}
    outline = {
        name: like for name, like in weights.outline.items() if name not in {m for s in members.values() for m in s}
    }
    for name, found in members.items():
        if found:
            likes = [weights.outline[member] for member in found]
            same = all(like.shape == likes[0].shape and like.dtype == likes[0].dtype for like in likes)
            # Where members differ, the check that follows shows a shape that fits no model.
            outline[name] = likes[0].new_empty(len(found), *(likes[0].shape if same else ()))

    def fill(name: str, tensor: Tensor) -> None:
        found = members.get(name)
        if not found:
            weights.fill(name, tensor)
            return

        def read(part: tuple[slice, ...]) -> Tensor:
            first, *rest = part
            return torch.stack([weights.read(member)[tuple(rest)] for member in found[first]])

        copy_part(tensor, read)

    return Weights(weights.where, outline, fill)


def unstacked(weights: Weights) -> Weights:
    """The weights with a tensor for each member of a stack. The stack that was last read from is kept."""
    outline: dict[str, Tensor] = {}
    places: dict[str, tuple[str, int]] = {}
    for name, like in weights.outline.items():
        if MANY not in name:
            outline[name] = like
            continue
        for i in range(len(like)):
            member = name.replace(MANY, str(i))
            outline[member], places[member] = like[i], (name, i)
    held: dict[str, Tensor] = {}

    def fill(name: str, tensor: Tensor) -> None:
        if name not in places:
            weights.fill(name, tensor)
            return
        stack, i = places[name]
        if stack not in held:
            held.clear()
            held[stack] = weights.read(stack)
        copy_part(tensor, held[stack][i].__getitem__)

    return Weights(weights.where, outline, fill)


def _members(name: str, outline: Mapping[str, Tensor]) -> list[str]:
    """The tensors of a stack, in order; none, if a number is missing, which the check that follows shows."""
    pattern = re.compile(re.escape(name).replace(re.escape(MANY), r"(0|[1-9]\d*)"))
    numbers = {int(found[1]): found[0] for found in map(pattern.fullmatch, outline) if found}
    return [numbers[i] for i in range(len(numbers))] if numbers.keys() == set(range(len(numbers))) else []
