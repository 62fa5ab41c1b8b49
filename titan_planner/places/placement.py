"""Which device serves which pipeline stage, on a network whose links differ: DT-FM's cost, and a search for its least.

A placement is an array of stages, each with the devices that share its gradients. Every quantity of two devices counts
both directions of the link between them.
"""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from titan_planner.places.network import Network, read_cases
from titan_planner.plan.cluster import describes, read_toml
from torchtitan.refusal import Refusal

_CANDIDATES = 32  # changes that are weighed at once
_OPTIONAL = ("layers", "microbatches", "exchange_every", "overlap", "layer_tflop", "layer_gib", "waiting_gib")
_MEANS, _HEAT = 0.3, 0.01  # of the search's energy


@dataclass(frozen=True)
class FixedPipeline:
    """What a step moves, in GB: a stage's gradients, and what one pipeline sends between two stages."""

    num_stages: int
    per_stage: int
    gradients: float
    activations: float
    # What our own objective knows beside; DT-FM's does not.
    layers: int = 0  # of the model; 0: one a stage
    microbatches: int = 1
    exchange_every: float = 1.0  # steps
    overlap: float = 0.0  # part of the exchange that is hidden
    layer_tflop: float = 0.0  # of a layer and microbatch, forward and backward
    layer_gib: float = 0.0  # memory of a layer, with its optimizer
    waiting_gib: float = 0.0  # of a layer and microbatch that waits for its backward


@dataclass(frozen=True)
class Placed:
    """A placement and its cost in seconds."""

    stages: tuple[tuple[int, ...], ...]  # in the order of the pipeline
    cost: float


class Placement:
    """DT-FM's cost: the slowest stage's exchange of gradients, and the cheapest path through all stages."""

    def __init__(self, network: Network, job: FixedPipeline) -> None:
        if (needed := job.num_stages * job.per_stage) != len(network.regions):
            raise Refusal(
                f"{job.num_stages} stages of {job.per_stage} devices need {needed}, but the network has "
                f"{len(network.regions)}; change stages or devices_per_stage"
            )
        self.network, self.job = network, job
        self._data = network.there_and_back(job.gradients / job.per_stage)
        self._edges = network.there_and_back(job.activations)

    def cost(self, stages: np.ndarray) -> float:
        return self._exact(stages)[0]

    def placed(self, stages: np.ndarray) -> Placed:
        cost, order = self._exact(stages)
        return Placed(tuple(tuple(int(d) for d in stages[stage]) for stage in order), cost)

    def _exact(self, stages: np.ndarray) -> tuple[float, list[int]]:
        edges = np.zeros((len(stages), len(stages)))
        for j, k in itertools.combinations(range(len(stages)), 2):
            edges[j, k] = edges[k, j] = bottleneck(self._edges[np.ix_(stages[j], stages[k])])
        length, order = shortest_path(edges)
        exchange = self._data[stages[:, :, None], stages[:, None, :]].sum(-1).max()
        return float(exchange + length), order

    def _energy(self, many: np.ndarray) -> np.ndarray:
        """For many placements, the cost if stages are in this order and devices of one column are paired.

        Means are added to the largest values, which hide from a search what the others become.
        """
        exchange = self._data[many[..., :, None], many[..., None, :]].sum(-1).max(-1)
        links = self._edges[many[:, :-1], many[:, 1:]]
        path = (links.max(-1) + _MEANS * links.mean(-1)).sum(-1)
        return exchange.max(-1) + _MEANS * exchange.mean(-1) + path

    def random(self, chance: np.random.Generator) -> np.ndarray:
        return chance.permutation(len(self.network.regions)).reshape(self.job.num_stages, -1)

    def starts(self) -> Iterator[np.ndarray]:
        """Each region along a pipeline, so that its stages are near each other; and each region within a stage."""
        regions: dict[str, list[int]] = {}
        for device, region in enumerate(self.network.regions):
            regions.setdefault(region, []).append(device)
        largest_first = sorted(regions.values(), key=len, reverse=True)
        columns: list[list[int]] = [[] for _ in range(self.job.per_stage)]
        for members in largest_first:
            column: list[int] = []
            for number, device in enumerate(members):
                if number % self.job.num_stages == 0 or len(column) == self.job.num_stages:
                    column = min(columns, key=len)
                column.append(device)
        yield np.array(columns).T.copy()
        yield np.array(list(itertools.chain(*largest_first))).reshape(self.job.num_stages, -1)

    def search(self, seed: int = 0, steps: int = 6000, restarts: int = 2, from_regions: bool = True) -> Placed:
        """The best placement found. The same seed gives the same answer."""
        chance = np.random.default_rng(seed)
        ends = [self._anneal(start, chance, steps // 10) for start in self.starts()] if from_regions else []
        ends += [self._anneal(self.random(chance), chance, steps) for _ in range(restarts)]
        return min((self.placed(end) for end in ends), key=lambda placed: placed.cost)

    def _anneal(self, start: np.ndarray, chance: np.random.Generator, steps: int) -> np.ndarray:
        """Swap devices, turn a piece of the pipeline round, or bring near devices together; at first for the worse.

        Of many candidates the best is taken, with noise of a temperature that falls to nothing.
        """
        here, energy = start.copy(), float(self._energy(start[None])[0])
        best, lowest, count, rows = here, energy, start.size, np.arange(_CANDIDATES)
        for step in range(steps):
            heat = _HEAT * energy * (1 - step / steps) ** 2
            many = np.repeat(here.reshape(1, -1), _CANDIDATES, 0)
            one, other = chance.integers(0, count, (2, _CANDIDATES))
            many[rows, one], many[rows, other] = here.flat[other], here.flat[one]
            many = many.reshape(_CANDIDATES, *start.shape)
            begin, end = np.sort(chance.integers(0, len(start) + 1, 2))
            many[0] = np.concatenate([here[:begin], here[begin:end][::-1], here[end:]])
            many[1] = self._gathered(here, chance, along=step % 2)
            energies = self._energy(many) + heat * chance.gumbel(size=_CANDIDATES)
            wins = int(energies.argmin())
            if energies[wins] <= energy + heat * chance.exponential():
                here, energy = many[wins], float(self._energy(many[wins : wins + 1])[0])
            if energy < lowest - 1e-12:
                best, lowest = here, energy
        return best

    def _gathered(self, here: np.ndarray, chance: np.random.Generator, along: int) -> np.ndarray:
        """With one column (or stage) made of the devices that are nearest to one of them, drawn at random."""
        view = (here if along else here.T).copy()  # rows are what is gathered
        row, device = chance.integers(0, len(view)), chance.integers(0, here.size)
        nearest = np.argsort(self._edges[device] + 1e-9 * chance.random(here.size), kind="stable")
        for place, wanted in enumerate(nearest[: view.shape[1]]):
            at = tuple(np.argwhere(view == wanted)[0])
            view[at], view[row, place] = view[row, place], wanted
        return view if along else view.T


def bottleneck(seconds: np.ndarray) -> float:
    """The least t for which rows and columns can be paired one to one with each pair's seconds at most t."""
    values = np.unique(seconds)
    low, high = 0, len(values) - 1
    while low < high:
        middle = (low + high) // 2
        if _can_pair(seconds <= values[middle]):
            high = middle
        else:
            low = middle + 1
    return float(values[low])


def _can_pair(allowed: np.ndarray) -> bool:
    partner: dict[int, int] = {}
    columns = [np.flatnonzero(row).tolist() for row in allowed]

    def find(row: int, seen: set[int]) -> bool:
        for column in columns[row]:
            if column not in seen:
                seen.add(column)
                if column not in partner or find(partner[column], seen):
                    partner[column] = row
                    return True
        return False

    return all(find(row, set()) for row in range(len(columns)))


def shortest_path(edges: np.ndarray) -> tuple[float, list[int]]:
    """The cheapest open path through all nodes, exactly up to 12 of them and greedily beyond, and its order."""
    count = len(edges)
    if count > 12:
        return min(_greedy_path(edges, start) for start in range(count))
    best = {(1 << node, node): (0.0, [node]) for node in range(count)}
    for _ in range(count - 1):
        longer: dict[tuple[int, int], tuple[float, list[int]]] = {}
        for (mask, last), (length, order) in best.items():
            for node in range(count):
                if not mask >> node & 1:
                    key, found = (mask | 1 << node, node), (length + edges[last, node], [*order, node])
                    if key not in longer or found < longer[key]:
                        longer[key] = found
        best = longer
    return min(best.values())


def _greedy_path(edges: np.ndarray, start: int) -> tuple[float, list[int]]:
    order, length = [start], 0.0
    while len(order) < len(edges):
        rest = [node for node in range(len(edges)) if node not in order]
        node = min(rest, key=lambda node: edges[order[-1], node])
        length, order = length + edges[order[-1], node], [*order, node]
    return length, order


def read_networks(path: Path) -> tuple[FixedPipeline, list[tuple[str, Network, Mapping[str, Any]]]]:
    """The job of a file and its networks."""
    with describes(path, "network"):
        said = read_toml(path)["job"]
        given = {key: said[key] for key in ("stages", "devices_per_stage", "c_dp", "c_pp")}
        given |= {key: said[key] for key in _OPTIONAL if key in said}
        least = dict.fromkeys(_OPTIONAL, 0.0)  # the others are above 0
        for key, value in given.items():
            if isinstance(value, bool) or not least.get(key, 1e-12) <= value < 1e12:
                raise Refusal(f"{path}: [job] {key} = {value!r}; use a positive number")
        return FixedPipeline(*list(given.values())[:4], **dict(list(given.items())[4:])), read_cases(path)
