"""Which tokens go through the model for rows to score. Rows that begin alike share their beginning.

Behind it stand the rest of each, apart from one another: a question with four answers is computed once, not four times.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

_MOST = 4  # times the tokens of the beginning: attention would be to more and more that is hidden


class Row(NamedTuple):
    """Token ids, of which those from `first` on are scored."""

    ids: Sequence[int]
    first: int


@dataclass
class Line:
    """A beginning, and what follows it in some rows."""

    begin: tuple[int, ...]
    ends: dict[tuple[int, ...], int] = field(default_factory=dict)  # where each stands
    rows: list[tuple[int, int]] = field(default_factory=list)  # their numbers, and where their ends stand
    length: int = 0

    def takes(self, end: tuple[int, ...], longest: int) -> bool:
        length = self.length + len(end)
        return end in self.ends or length <= min(longest, (1 + _MOST) * len(self.begin))

    def add(self, number: int, end: tuple[int, ...]) -> None:
        self.length = self.length or len(self.begin)
        if end not in self.ends:
            self.ends[end] = self.length
            self.length += len(end)
        self.rows.append((number, self.ends[end]))

    def scored(self, rows: Sequence[Row]) -> Iterator[tuple[int, int, int]]:
        """Places, the tokens whose probabilities they give, and whose these are."""
        for number, at in self.rows:
            ids, first = rows[number]
            for place in range(first - 1, len(ids) - 1):
                behind = place - len(self.begin)
                yield place if behind < 0 else at + behind, ids[place + 1], number


def plan_lines(rows: Sequence[Row], can_share: bool, longest: int) -> list[Line]:
    """Without `can_share` only rows share that differ in their last token alone, so that every line is a text."""
    lines: list[Line] = []
    newest: dict[tuple[int, ...], Line] = {}
    for number, row in enumerate(rows):
        cut = min(row.first, len(row.ids) - 1) if can_share else len(row.ids) - 1
        begin, end = tuple(row.ids[:cut]), tuple(row.ids[cut:-1])
        line = newest.get(begin)
        if line is None or not line.takes(end, longest):
            line = newest[begin] = Line(begin)
            lines.append(line)
        line.add(number, end)
    return lines


def places_and_mask(lines: Sequence[Line], shape: torch.Size, device: torch.device) -> tuple[Tensor, Tensor] | None:
    """Positions [B, S] and who sees whom [B, 1, S, S]; None if every line is a text."""
    if all(line.length - len(line.begin) == max(map(len, line.ends)) for line in lines):
        return None
    positions, owners = torch.zeros(shape, dtype=torch.long), torch.full(shape, -1)
    for row, line in enumerate(lines):
        common = len(line.begin)
        positions[row, :common], owners[row, :common] = torch.arange(common), 0
        for number, (end, at) in enumerate(line.ends.items(), 1):
            positions[row, at : at + len(end)] = torch.arange(common, common + len(end))
            owners[row, at : at + len(end)] = number
    positions, owners = positions.to(device), owners.to(device)
    seen = (owners[:, None] == 0) | (owners[:, None] == owners[:, :, None])
    return positions, seen.tril()[:, None]
