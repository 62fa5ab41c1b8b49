"""What a site has sent of a fragment so far: its ranks' pieces, which fit together or are refused when they come."""

import itertools
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from titan_fleet.swarm.fragments import Box
from torchtitan.refusal import Refusal


@dataclass
class Pieces:
    base: int = -1  # the version of the anchor that they differ from; -1: these are first weights
    step: int = 0
    tokens: int = 0
    session: int = 0  # of the site
    pieces: dict[int, tuple[list[Box], memoryview]] = field(default_factory=dict)  # by rank
    size: int = 0  # numbers so far
    complete_at: float = 0.0

    def put(self, rank: int, boxes: list[Box], payload: memoryview, fragment: Sequence[Box]) -> bool:
        """Whether the fragment is whole now. What is whole stays as it is."""
        if self.complete_at:
            return True
        before, whole = self.pieces.get(rank, ([], payload))[0], _size(fragment)
        size = self.size - _size(before) + _size(boxes)
        others = (box for other, (each, _) in self.pieces.items() if other != rank for box in each)
        if size > whole or (size == whole and not _tile(fragment, itertools.chain(others, boxes))):
            raise Refusal(
                f"rank {rank} of this site sends numbers that its other ranks send, too: {size} of a fragment of "
                f"{whole}; the site cuts the model otherwise than the run"
            )
        self.pieces[rank], self.size = (boxes, payload), size
        self.complete_at = time.monotonic() if size == whole else 0.0
        return size == whole


def view(tensor: Tensor, whole: Box, box: Box) -> Tensor:
    """The part of the tensor, which holds a whole box, that another box means."""
    return tensor[box.row - whole.row : box.end_row - whole.row, box.column : box.end_column]


def _size(boxes: Iterable[Box]) -> int:
    return sum(box.size for box in boxes)


def _tile(fragment: Sequence[Box], boxes: Iterable[Box]) -> bool:
    """Whether the boxes, which have as many numbers as the fragment, have each of them."""
    of_weight: dict[int, list[Box]] = {}
    for box in boxes:
        of_weight.setdefault(box.weight, []).append(box)
    for whole in fragment:
        seen = torch.zeros(whole.shape, dtype=torch.bool)
        for box in of_weight.get(whole.weight, ()):
            view(seen, whole, box).fill_(True)
        if not seen.all():
            return False
    return True
