"""A pipeline over time: when each rank does what, how long it waits, and how much it keeps meanwhile. No torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Action(NamedTuple):
    stage: int
    kind: str  # F forward, B backward, or its two parts: I of inputs, W of weights
    microbatch: int


Orders = list[list[Action]]  # by rank


@dataclass(frozen=True)
class Span:
    """An action, and when it runs."""

    action: Action
    begin: float
    end: float


@dataclass(frozen=True)
class Timeline:
    spans: tuple[tuple[Span, ...], ...]  # by rank

    @property
    def seconds(self) -> float:
        return max(spans[-1].end for spans in self.spans if spans)

    def idle(self, rank: int) -> float:
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


def simulate(orders: Orders, seconds: Mapping[tuple[int, str], float], hop: float) -> Timeline:
    """Run the lists. `seconds`: of a stage's action by its kind; `hop`: of a message to another rank.

    A rank takes its list in order, and an action begins when the rank is free and its inputs have come.
    """
    holder = {action.stage: rank for rank, actions in enumerate(orders) for action in actions}
    last, done = max(holder), dict[Action, float]()
    spans: list[list[Span]] = [[] for _ in orders]
    at, free = [0] * len(orders), [0.0] * len(orders)
    ready = list(range(len(orders)))
    waits: dict[Action, int] = {}  # what a rank waits for -> the rank
    while ready:
        rank = ready.pop()
        while at[rank] < len(orders[rank]):
            action = orders[rank][at[rank]]
            begin = free[rank]
            for needed in _needs(action, last):
                found = next((done[one] for one in needed if one in done), None)
                if found is None:
                    waits |= dict.fromkeys(needed, rank)
                    break
                begin = max(begin, found + (hop if holder[needed[0].stage] != rank else 0.0))
            else:
                free[rank] = begin + seconds[action.stage, action.kind]
                spans[rank].append(Span(action, begin, free[rank]))
                done[action] = free[rank]
                at[rank] += 1
                if action in waits and (other := waits.pop(action)) != rank:
                    ready.append(other)
                continue
            break
    if any(place < len(actions) for place, actions in zip(at, orders, strict=True)):
        rank = next(r for r, place in enumerate(at) if place < len(orders[r]))
        raise Stuck(f"rank {rank} waits for ever at {orders[rank][at[rank]]}")
    return Timeline(tuple(map(tuple, spans)))


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
