"""A pipeline over time: when each rank does what, how long it waits, and how much it keeps meanwhile. No torch."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from torchtitan.models.operations import Number


class Action(NamedTuple):
    stage: int
    kind: str  # F forward, B backward, or its two parts: I of inputs, W of weights
    microbatch: int


Orders = list[list[Action]]  # by rank


@dataclass(frozen=True)
class Span:
    """An action, and when it runs."""

    action: Action
    begin: Number
    end: Number


@dataclass(frozen=True)
class Timeline:
    spans: tuple[tuple[Span, ...], ...]  # by rank

    @property
    def seconds(self) -> Number:
        return np.max([spans[-1].end for spans in self.spans if spans], axis=0)

    def idle(self, rank: int) -> Number:
        """The part of the whole time in which a rank does nothing."""
        return 1 - sum(span.end - span.begin for span in self.spans[rank]) / self.seconds

    def waiting(self, rank: int, kept: Mapping[int, float]) -> float:
        """The most that a rank keeps for backward at once; `kept`: of a microbatch, by stage."""
        now, most = 0.0, 0.0
        for span in self.spans[rank]:
            stage, kind, _ = span.action
            now += kept[stage] if kind == "F" else 0
            most = max(most, now)
            now -= kept[stage] if kind in "BW" else 0
        return most


class Stuck(Exception):
    """The lists wait for each other."""


def simulate(orders: Orders, seconds: Mapping[tuple[int, str], Number], hop: Number) -> Timeline:
    """Run the lists. `seconds`: of a stage's action by its kind; `hop`: of a message to another rank.

    A rank takes its list in order, and an action begins when the rank is free and its inputs have come. A number may
    be an array over many layouts, since the lists alone say who waits for whom.
    """
    holder = {action.stage: rank for rank, actions in enumerate(orders) for action in actions}
    ends = dict[Action, Number]()
    spans: list[list[Span]] = [[] for _ in orders]
    for rank, action, needed in _in_time(orders, max(holder)):
        begin = spans[rank][-1].end if spans[rank] else 0.0
        for one in needed:
            begin = np.maximum(begin, ends[one] + hop if holder[one.stage] != rank else ends[one])
        ends[action] = begin + seconds[action.stage, action.kind]
        spans[rank].append(Span(action, begin, ends[action]))
    return Timeline(tuple(map(tuple, spans)))


def _in_time(orders: Orders, last: int) -> Iterator[tuple[int, Action, list[Action]]]:
    """Each action after all that it waits for, with its rank."""
    done, at = set[Action](), [0] * len(orders)
    ready = list(range(len(orders)))
    waits: dict[Action, int] = {}  # what a rank waits for -> the rank
    while ready:
        rank = ready.pop()
        while at[rank] < len(orders[rank]):
            action = orders[rank][at[rank]]
            either = _needs(action, last)
            missing = [some for some in either if done.isdisjoint(some)]
            if missing:
                waits |= dict.fromkeys(missing[0], rank)
                break
            yield rank, action, [one for some in either for one in some if one in done]
            done.add(action)
            at[rank] += 1
            if action in waits and (other := waits.pop(action)) != rank:
                ready.append(other)
    if any(place < len(actions) for place, actions in zip(at, orders, strict=True)):
        rank = next(r for r, place in enumerate(at) if place < len(orders[r]))
        raise Stuck(f"rank {rank} waits for ever at {orders[rank][at[rank]]}")


def _needs(action: Action, last: int) -> Sequence[Sequence[Action]]:
    """What must be done before; of each sequence, one."""
    stage, kind, microbatch = action
    if kind == "F":
        return [[Action(stage - 1, "F", microbatch)]] if stage else []
    if kind == "W":
        return [[Action(stage, "I", microbatch)]]
    own = [Action(stage, "F", microbatch)]
    if stage == last:
        return [own]
    return [own, [Action(stage + 1, "B", microbatch), Action(stage + 1, "I", microbatch)]]
