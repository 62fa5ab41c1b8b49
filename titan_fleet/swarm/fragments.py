"""What sites exchange: fragments of the model, in rows of its weights, and the part of them that a rank holds.

A weight is taken as a matrix: of two dimensions or more by its first, of one dimension as a single row.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from torchtitan.refusal import Refusal


@dataclass(frozen=True)
class Weight:
    name: str
    shape: tuple[int, ...]

    @property
    def rows(self) -> int:
        return as_matrix(self.shape)[0]

    @property
    def columns(self) -> int:
        return as_matrix(self.shape)[1]


class Box(NamedTuple):
    """Some rows and columns of one weight."""

    weight: int  # its place in the table of weights
    row: int
    end_row: int
    column: int
    end_column: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.end_row - self.row, self.end_column - self.column

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def within(self, other: "Box") -> "Box | None":
        """What both hold."""
        row, column = max(self.row, other.row), max(self.column, other.column)
        end_row, end_column = min(self.end_row, other.end_row), min(self.end_column, other.end_column)
        if self.weight != other.weight or row >= end_row or column >= end_column:
            return None
        return Box(self.weight, row, end_row, column, end_column)


def as_matrix(shape: Sequence[int]) -> tuple[int, int]:
    return (1, math.prod(shape)) if len(shape) < 2 else (shape[0], math.prod(shape[1:]))


def box_of(weight: int, shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int], name: str) -> Box:
    """The part of a weight that begins at these offsets and has these sizes."""
    if len(shape) < 2:
        begin = offsets[0] if shape else 0
        return Box(weight, 0, 1, begin, begin + math.prod(sizes))
    if tuple(sizes[1:]) == tuple(shape[1:]):
        return Box(weight, offsets[0], offsets[0] + sizes[0], 0, math.prod(shape[1:]))
    if len(shape) > 2:
        raise Refusal(
            f"{name} has the size {list(shape)}, and tensor parallelism cuts it otherwise than by its first dimension, "
            "which a swarm cannot exchange; leave it out of the tensor plan"
        )
    return Box(weight, offsets[0], offsets[0] + sizes[0], offsets[1], offsets[1] + sizes[1])


def divide(weights: Sequence[Weight], count: int) -> list[list[Box]]:
    """Fragments of about the same size, cut between rows; the order of the weights decides."""
    ends = [sum(w.rows * w.columns for w in weights) * (number + 1) / count for number in range(count)]
    fragments: list[list[Box]] = [[] for _ in range(count)]
    place, number = 0, 0
    for index, weight in enumerate(weights):
        row = 0
        while row < weight.rows:
            fits = round((ends[number] - place) / weight.columns) if number < count - 1 else weight.rows
            end = min(weight.rows, row + max(0, fits))
            if end > row:
                fragments[number].append(Box(index, row, end, 0, weight.columns))
                place += (end - row) * weight.columns
                row = end
            if row < weight.rows:
                number += 1
    if empty := [number for number, boxes in enumerate(fragments) if not boxes]:
        raise Refusal(
            f"swarm.fragments = {count}, but the model's {len(weights)} weights are too few or too unlike: fragment "
            f"{empty[0]} would be empty; use fewer"
        )
    return fragments


def held_of(fragment: Iterable[Box], held: Iterable[Box]) -> list[Box]:
    """What a rank that holds these boxes has of a fragment."""
    own: dict[int, list[Box]] = {}
    for box in held:
        own.setdefault(box.weight, []).append(box)
    found = [piece.within(box) for piece in fragment for box in own.get(piece.weight, ())]
    return [box for box in found if box is not None]


def checksum(tensors: Iterable[Tensor]) -> int:
    """Of all bits, as a sum over the numbers, so that ranks can add up theirs."""
    return sum(int(each.contiguous().view(torch.int32).sum(dtype=torch.int64)) for each in tensors)


def squares(values: Tensor) -> float:
    """The sum of all squares; float32 in a row, float64 over the rows."""
    return float(torch.linalg.vector_norm(values, dim=-1).double().square().sum())
