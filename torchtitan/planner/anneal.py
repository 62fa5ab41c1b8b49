"""Annealing of many placements at once, with the layers of their stages."""

from collections.abc import Callable

import numpy as np

_POOL = 1024  # changes of more than two nodes that are drawn once
_WHOLE, _LAYERS = 8, 6  # of so many chains, one makes such a change, and one moves a layer
_CULLS = 40  # times that the best quarter of the chains takes the place of the worst
_HOTTEST, _COLDEST = 0.01, 0.0003  # heat, as a part of the chains' mean energy
Energy = Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]


def anneal(
    energy: Energy, replicas: int, nodes: np.ndarray, layers: np.ndarray, chance: np.random.Generator, steps: int
) -> tuple[np.ndarray, np.ndarray]:
    """The best placement that any chain met, and its layers. `nodes`: [node, chain]; `layers`: [stage, chain].

    Nodes beyond stages x replicas are not used. Each chain makes one change a step, most of them a swap of two nodes.
    """
    (count, chains), stages = nodes.shape, len(layers)
    rows, used = np.arange(chains), stages * replicas
    orders, moved = _whole_changes(count, stages, replicas, chance)
    energies, seconds = energy(nodes, layers)
    lowest = (np.inf, np.inf)
    best = nodes[:, 0], layers[:, 0]
    for step in range(steps):
        heat = _HOTTEST * (_COLDEST / _HOTTEST) ** (step / steps) * energies.mean()
        many, cuts = nodes.copy(), layers.copy()
        one, other = chance.integers(0, used, chains), chance.integers(0, count, chains)
        many[one, rows], many[other, rows] = nodes[other, rows], nodes[one, rows]
        which, change = chance.integers(0, chains, chains // _WHOLE), chance.integers(0, _POOL, chains // _WHOLE)
        many[:, which], cuts[:, which] = nodes[orders[:, change], which], layers[moved[:, change], which]
        which = chance.permutation(chains)[: chains // _LAYERS]
        giver, taker = chance.integers(0, stages, (2, len(which)))
        taker = np.where(cuts[giver, which] > 1, taker, giver)
        cuts[giver, which] -= 1
        cuts[taker, which] += 1
        alone = which[: len(which) // 2]  # these only move a layer
        many[:, alone] = nodes[:, alone]
        after, seconds = energy(many, cuts)
        found = int(np.lexsort((after, seconds))[0])
        if (float(seconds[found]), float(after[found])) < lowest:
            lowest, best = (float(seconds[found]), float(after[found])), (many[:, found].copy(), cuts[:, found].copy())
        taken = after < energies + heat * chance.exponential(size=chains)
        nodes, layers, energies = (
            np.where(taken, new, old) for new, old in ((many, nodes), (cuts, layers), (after, energies))
        )
        if (step + 1) % max(1, steps // _CULLS) == 0 and step < steps - 1:
            order, few = np.argsort(energies, kind="stable"), chains // 4
            for kept in (nodes.T, layers.T, energies):  # views, so that the arrays themselves change
                kept[order[chains - few :]] = kept[order[:few]]
    return best


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
