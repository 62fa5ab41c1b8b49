"""Annealing of many placements at once, with the layers of their stages."""

from collections.abc import Callable

import numpy as np

_POOL = 1024  # changes of more than two nodes that are drawn once
_PART = 8  # of so many chains, one makes such a change, and one moves a layer
_RANDOM = 4  # of so many chains, one swaps two nodes at random; in the others, a near node comes to a node's side
_NEAR = 6  # nodes that are near to a node
_DRAWN = 100  # steps whose chances are drawn at once
_CULLS = 40  # times that the best quarter of the chains takes the place of the worst
_HOTTEST, _COLDEST = 0.01, 0.001  # heat, as a part of the chains' mean energy
Energy = Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]
Apart = tuple[np.ndarray, np.ndarray]  # seconds between two nodes in neighboring stages, and in neighboring replicas


def anneal(
    energy: Energy,
    apart: Apart,
    replicas: int,
    nodes: np.ndarray,
    layers: np.ndarray,
    chance: np.random.Generator,
    steps: int,
) -> tuple[np.ndarray, np.ndarray]:
    """The best placement that any chain met, and its layers. `nodes`: [node, chain]; `layers`: [stage, chain].

    Nodes beyond stages x replicas are not used. Each chain makes one change a step, most of them a swap of two nodes.
    """
    chains = nodes.shape[1]
    changes = _Changes(apart, len(layers), replicas, chains, chance)
    energies, seconds = energy(nodes, layers)
    lowest = (np.inf, np.inf)
    best = nodes[:, 0], layers[:, 0]
    for step in range(steps):
        now = step % _DRAWN
        if now == 0:
            changes.draw()
            luck, mean = chance.exponential(size=(_DRAWN, chains)), float(energies.mean())
        many, cuts = changes.make(now, nodes, layers)
        after, seconds = energy(many, cuts)
        if seconds.min() <= lowest[0]:
            found = int(np.lexsort((after, seconds))[0])
            if (float(seconds[found]), float(after[found])) < lowest:
                lowest = float(seconds[found]), float(after[found])
                best = many[:, found].copy(), cuts[:, found].copy()
        heat = _HOTTEST * (_COLDEST / _HOTTEST) ** (step / steps) * mean
        taken = after < energies + heat * luck[now]
        nodes, layers, energies = (
            np.where(taken, new, old) for new, old in ((many, nodes), (cuts, layers), (after, energies))
        )
        if (step + 1) % max(1, steps // _CULLS) == 0 and step < steps - 1:
            order, few = np.argsort(energies, kind="stable"), chains // 4
            for kept in (nodes.T, layers.T, energies):  # views, so that the arrays themselves change
                kept[order[chains - few :]] = kept[order[:few]]
    return best


class _Changes:
    """A change of each chain, drawn for many steps at once."""

    def __init__(self, apart: Apart, stages: int, replicas: int, chains: int, chance: np.random.Generator) -> None:
        self._chance, self._stages, self._rows = chance, stages, np.arange(chains)
        self._count, self._used = len(apart[0]), stages * replicas
        self._part, self._guided = chains // _PART, chains - chains // _RANDOM
        self._orders, self._moved = _whole_changes(self._count, stages, replicas, chance)
        self._beside, self._near = _neighbors(apart, stages, replicas)

    def draw(self) -> None:
        draw, chains, part = self._chance.integers, len(self._rows), self._part
        self._places = draw(0, ((self._used,), (self._count,)), (_DRAWN, 2, chains))
        self._sides = draw(0, len(self._beside), (_DRAWN, self._guided))
        self._choices = draw(0, self._near.shape[-1], (_DRAWN, self._guided))
        self._whole = draw(0, _POOL, (_DRAWN, part))
        self._shifts = draw(0, self._stages, (_DRAWN, 2, part))
        self._begins = part * draw(0, chains // part, (_DRAWN, 2))

    def make(self, now: int, nodes: np.ndarray, layers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        many, cuts, rows, chains, part = nodes.copy(), layers.copy(), self._rows, len(self._rows), self._part
        (one, other), guided, side = self._places[now], self._guided, self._sides[now]
        at = one[:guided]
        wanted = self._near[side, nodes[at, rows[:guided]], self._choices[now]]
        other[:guided] = (nodes[:, :guided] == wanted).argmax(0)
        one[:guided] = self._beside[side, at]
        flat, one, other = many.ravel(), one * chains + rows, other * chains + rows
        flat[one], flat[other] = flat[other], flat[one]
        some, others = (slice(begin, begin + part) for begin in self._begins[now])
        for after, before, orders in ((many, nodes, self._orders), (cuts, layers, self._moved)):
            after[:, some] = before.take(orders.take(self._whole[now], 1) * chains + rows[some])
        flat, (giver, taker) = cuts.ravel(), self._shifts[now] * chains + rows[others]
        taker = np.where(flat[giver] > 1, taker, giver)
        flat[giver] -= 1
        flat[taker] += 1
        alone = rows[others][: part // 2]  # these only move a layer
        many[:, alone] = nodes[:, alone]
        return many, cuts


def _neighbors(apart: Apart, stages: int, replicas: int) -> tuple[np.ndarray, np.ndarray]:
    """Each place's neighbor on each side, [side, place], and the nodes that are nearest to a node, [side, node, n]."""
    places, count = np.arange(stages * replicas).reshape(stages, replicas), len(apart[0])
    after = (np.arange(count) - np.arange(count)[:, None]) % count  # a tie goes to the nodes that follow in the network
    beside, near = [], []
    for axis, seconds in enumerate(apart):
        order = np.lexsort((after, np.where(after == 0, np.inf, seconds)))
        for turn in (1, -1) if places.shape[axis] > 1 else ():
            beside.append(np.roll(places, turn, axis).ravel())
            near.append(order[:, :_NEAR])
    return np.array(beside), np.array(near)


def _whole_changes(
    count: int, stages: int, replicas: int, chance: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Changes of more than two nodes: from where each node comes [node, change], and each stage's layers."""
    orders = np.repeat(np.arange(count)[:, None], _POOL, 1)
    moved = np.repeat(np.arange(stages)[:, None], _POOL, 1)
    for column in range(_POOL):
        shape, order = np.arange(stages * replicas).reshape(stages, replicas), np.arange(stages)
        kind, (a, b), (c, d) = column % 10, chance.integers(0, stages, 2), chance.integers(0, replicas, 2)
        low, high, near, far = min(a, b), max(a, b) + 1, min(c, d), max(c, d) + 1
        if kind == 0:  # turn a piece of the pipeline round
            order[low:high] = order[low:high][::-1].copy()
            shape = shape[order]
        elif kind == 1:  # one stage elsewhere
            order = np.insert(np.delete(order, a), b, a)
            shape = shape[order]
        elif kind in (2, 3):  # two stages change nodes, or layers
            order[[a, b]] = order[[b, a]]
            shape, order = (shape[order], np.arange(stages)) if kind == 2 else (shape, order)
        elif kind == 4:  # turn a piece of all rings round
            shape[:, near:far] = shape[:, near:far][:, ::-1].copy()
        elif kind in (5, 6):  # two pipelines go on in each other's place
            shape[a:, [c, d]] = shape[a:, [d, c]]
        elif kind == 7:  # turn a piece of one ring round
            shape[a, near:far] = shape[a, near:far][::-1].copy()
        else:  # turn one ring on
            shape[a] = np.roll(shape[a], c)
        orders[: stages * replicas, column], moved[:, column] = shape.ravel(), order
    return orders, moved
