"""Annealing of a placement and of its layers, many changes weighed at once."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

_CANDIDATES = 64  # changes that are weighed at once
_WHOLE = 2  # of them change more than two nodes
Energy = Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]


@dataclass(frozen=True)
class Moves:
    """Changes of a placement. Nodes beyond stages x replicas are not used."""

    stages: int
    replicas: int
    near: np.ndarray  # [node, node]: what a link costs
    shifts: bool  # whether layers may move between stages

    def of(
        self, here: np.ndarray, layers: np.ndarray, chance: np.random.Generator, step: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """[node, change], [stage, change]. Most swap two nodes; some move a layer, too, or instead."""
        used, rows = self.stages * self.replicas, np.arange(_CANDIDATES)
        many, cuts = np.repeat(here[:, None], _CANDIDATES, 1), np.repeat(layers[:, None], _CANDIDATES, 1)
        one, other = chance.integers(0, used, _CANDIDATES), chance.integers(0, len(here), _CANDIDATES)
        if self.shifts:
            other[-12:] = one[-12:]  # these only move a layer
            giver, taker = chance.integers(0, self.stages, (2, 24))
            taker = np.where(cuts[giver, rows[-24:]] > 1, taker, giver)
            cuts[giver, rows[-24:]] -= 1
            cuts[taker, rows[-24:]] += 1
        many[one, rows], many[other, rows] = here[other], here[one]
        many[:, :_WHOLE], cuts[:, :_WHOLE] = here[:, None], layers[:, None]
        for column in range(_WHOLE):
            nodes, cut = self._whole((_WHOLE * step + column) % 7, here, layers, chance)
            many[:used, column], cuts[:, column] = nodes.ravel(), cut
        return many, cuts

    def _whole(
        self, kind: int, here: np.ndarray, layers: np.ndarray, chance: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        """A change of more than two nodes; the stages with their layers."""
        shape = here[: self.stages * self.replicas].reshape(self.stages, self.replicas)
        order, (a, b) = np.arange(self.stages), chance.integers(0, self.stages, 2).tolist()
        if kind == 0:  # turn a piece of the pipeline round
            a, b = min(a, b), max(a, b) + 1
            order[a:b] = np.arange(a, b)[::-1]
            return shape[order], layers[order]
        if kind == 1:  # one stage elsewhere
            order = np.insert(np.delete(order, a), b, a)
            return shape[order], layers[order]
        order[[a, b]] = b, a
        if kind == 2:  # two stages change nodes, and layers stay
            return shape[order], layers
        if kind == 3:  # or layers, and nodes stay
            return shape, layers[order]
        if kind == 4:
            return self._gathered(here, chance, along=a % 2 == 0), layers
        c, d = chance.integers(0, self.replicas, 2).tolist()
        if kind == 5:  # turn a piece of all rings round
            order, (c, d) = np.arange(self.replicas), (min(c, d), max(c, d) + 1)
            order[c:d] = np.arange(c, d)[::-1]
            return shape[:, order], layers
        tails = shape.copy()  # two pipelines go on in each other's place
        tails[a:, c], tails[a:, d] = shape[a:, d], shape[a:, c]
        return tails, layers

    def _gathered(self, here: np.ndarray, chance: np.random.Generator, along: bool) -> np.ndarray:
        """One pipeline (or stage) made of the nodes that are nearest to one of them, drawn at random."""
        used = self.stages * self.replicas
        shape = here[:used].reshape(self.stages, self.replicas)
        view = (shape if along else shape.T).copy()
        row, flat = chance.integers(0, len(view)), view.ravel()
        device = flat[chance.integers(0, used)]
        nearest = flat[np.argsort(self.near[device, flat], kind="stable")][: view.shape[1]]
        places = {int(node): place for place, node in enumerate(flat)}
        for place, wanted in enumerate(nearest, row * view.shape[1]):
            at, there = places[int(wanted)], int(flat[place])
            flat[at], flat[place] = there, wanted
            places[there], places[int(wanted)] = at, place
        return flat if along else flat.reshape(view.shape).T.ravel()


def anneal(
    energy: Energy,
    moves: Moves,
    start: np.ndarray,
    layers: np.ndarray,
    chance: np.random.Generator,
    steps: int,
    hottest: float,
) -> tuple[np.ndarray, np.ndarray]:
    """The best placement met. Of many changes the best is taken, with noise of a heat that falls to nothing.

    `hottest`: a part of the energy.
    """
    here, cut = start.copy(), layers.copy()
    energies, seconds = energy(here[:, None], cut[:, None])
    now, best, lowest = float(energies[0]), (here, cut), (float(seconds[0]), float(energies[0]))
    for step in range(steps):
        heat = hottest * now * (1 - step / steps) ** 2
        many, cuts = moves.of(here, cut, chance, step)
        energies, seconds = energy(many, cuts)
        found = int(seconds.argmin())
        if (float(seconds[found]), float(energies[found])) < lowest:
            lowest, best = (
                (float(seconds[found]), float(energies[found])),
                (many[:, found].copy(), cuts[:, found].copy()),
            )
        wins = int((energies + heat * chance.gumbel(size=len(energies))).argmin())
        if energies[wins] <= now + heat * chance.exponential():
            here, cut, now = many[:, wins].copy(), cuts[:, wins].copy(), float(energies[wins])
    return best
