"""A pipeline on unlike devices and links: what a step takes, and how many layers each stage gets.

Many plans are weighed at once, as arrays whose last axis counts them: nodes [stage, replica, plan] and layers
[stage, plan].
"""

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from titan_planner.places.annealing import anneal
from titan_planner.places.network import Network
from torchtitan.refusal import Refusal

_EXHAUSTIVE = 300_000  # plans that are all tried
_CHAINS, _FEW = 256, 128  # placements that are annealed at once; of more nodes than a few, a quarter of them
_SHORT = 500, 3000  # steps of searches that come first on a regular network
_MEANS = 0.5  # of a stage's and a ring's seconds: what the largest one hides from a search


@dataclass(frozen=True)
class Load:
    """What a step asks of each node, at each stage. Arrays have an entry a node; seconds are of a microbatch."""

    stages: int
    replicas: int
    layers: int
    layer: np.ndarray  # seconds of a layer, forward and backward
    last: np.ndarray  # seconds of what follows the last layer
    most: np.ndarray  # [node, stage]: layers that the memory holds
    sent: float  # GB of a message; as many come back
    exchanged: float  # GB of a layer that go round all replicas of a stage, there and back together
    ends: tuple[float, float] = (0.0, 0.0)  # what the first and the last stage exchange beside, in layers
    microbatches: int = 1
    passes: int = 1
    overlap: float = 0.0  # part of the exchange that is hidden
    every: float = 1.0  # steps between two exchanges
    update: float = 0.0  # seconds of the optimizer
    beside: bool = False  # the exchange runs beside the computation, as without a pipeline

    def __post_init__(self) -> None:
        if self.stages * self.replicas > len(self.layer):
            raise Refusal(
                f"{self.stages} stages of {self.replicas} nodes need {self.stages * self.replicas}, but the network "
                f"has {len(self.layer)}; use fewer"
            )
        if self.layers < self.stages:
            raise Refusal(f"{self.layers} layers cannot fill {self.stages} stages; use at most {self.layers} stages")


@dataclass(frozen=True)
class Plan:
    """Nodes of each stage, in the order of replicas, with the stage's layers, and what a step takes."""

    nodes: tuple[tuple[int, ...], ...]
    layers: tuple[int, ...]
    seconds: float
    parts: dict[str, float] = field(compare=False, default_factory=dict)
    fits: bool = True


@dataclass(frozen=True)
class _Stages:
    """All that the layers of a plan do not change. [stage or hop, plan]"""

    layer: np.ndarray
    last: np.ndarray  # [plan]
    most: np.ndarray
    hop: np.ndarray
    busy: np.ndarray
    ring_delay: np.ndarray
    ring_layer: np.ndarray


class Pipelines:
    """The time of a step under 1F1B: fill, steady state, exchange.

    A stage is as slow as its slowest node, a hop as its slowest link, and a ring of replicas as its slowest link. Each
    link counts in both directions.
    """

    def __init__(self, network: Network, load: Load) -> None:
        self.network, self.load = network, load
        count = len(network.regions)
        self.count, self.used = count, load.stages * load.replicas
        gigabit = 8 / network.bandwidth
        there = load.sent * gigabit
        hop, busy = network.there_and_back(load.sent), np.maximum(there, there.T)
        delay = (load.replicas - 1) * (network.delay + network.delay.T)
        layer = (load.replicas - 1) / load.replicas * load.exchanged / 2 * (gigabit + gigabit.T)
        self.near, self._apart = hop, (hop, delay + layer)
        # One look-up in a table finds two numbers. Index of the first table: stage * count + node; of the others:
        # from * count + to. The worst is always the largest, so the layers that a memory holds are negative.
        slow = np.broadcast_to(load.layer, load.most.T.shape)
        pairs = (slow, -load.most.T), (hop, busy), (delay, layer)
        self._exact = [np.stack([one.ravel(), other.ravel()], 1).astype(float) for one, other in pairs]
        self._quick = [table.astype(np.float32) for table in self._exact]
        self._offsets = (np.arange(load.stages) * count)[:, None, None]
        self._ring = np.roll(np.arange(self.used).reshape(load.stages, -1), -1, 1).ravel()
        # Under 1F1B, a stage lets this many microbatches wait; each comes back after a round through all later stages.
        waiting = np.minimum(load.microbatches, np.arange(load.stages, 0, -1))
        self._rounds = np.triu(np.ones((load.stages, load.stages))) / waiting[:, None]
        self._extra = np.zeros((load.stages, 1))
        self._extra[0] += load.ends[0]
        self._extra[-1] += load.ends[1]

    def stages(self, many: np.ndarray, quick: bool = False) -> _Stages:
        load, (of_nodes, of_hops, of_rings) = self.load, self._quick if quick else self._exact
        many = many[: self.used]
        rows, nodes = many * self.count, many.reshape(load.stages, load.replicas, -1)
        hop, busy = _worst(of_hops, rows[: -load.replicas] + many[load.replicas :], nodes[1:].shape)
        delay = slowest = np.zeros((load.stages, nodes.shape[-1]))
        if load.replicas > 1:
            delay, slowest = _worst(of_rings, rows + many.take(self._ring, 0), nodes.shape)
        layer, less = _worst(of_nodes, nodes + self._offsets, nodes.shape)
        return _Stages(layer, load.last.take(nodes[-1]).max(0), -less, hop, busy, delay, slowest)

    def parts(self, stages: _Stages, layers: np.ndarray) -> dict[str, np.ndarray]:
        return self._parts(stages, layers)[0]

    def _parts(self, stages: _Stages, layers: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """The parts of a step, and what they would be if all stages, and all rings, took the mean."""
        load = self.load
        seconds = stages.layer * layers
        seconds[-1] += stages.last
        rounds = self._rounds @ seconds + self._rounds[:, :-1] @ stages.hop
        slowest = seconds.max(0)
        period = np.maximum(np.maximum(rounds.max(0), slowest), stages.busy.max(0, initial=0.0))
        computed = seconds.sum(0)
        exchange = self.exchanged(stages, layers)
        longest, share = exchange.max(0), load.passes * (1 - load.overlap) / load.every
        if load.beside:
            longest = np.maximum(0, longest - slowest)
        parts = {
            "fill": load.passes * (computed + stages.hop.sum(0)),
            "steady state": load.passes * (load.microbatches - 1) * period,
            "exchange": share * longest,
            "optimizer": np.full_like(computed, load.update),
        }
        return parts, (load.passes * load.microbatches * computed + share * exchange.sum(0)) / load.stages

    def exchanged(self, stages: _Stages, layers: np.ndarray) -> np.ndarray:
        """Seconds of each stage's ring."""
        return stages.ring_delay + stages.ring_layer * (layers + self._extra)

    def seconds(self, many: np.ndarray, layers: np.ndarray) -> np.ndarray:
        stages = self.stages(many)
        total = sum(self.parts(stages, layers).values())
        return np.where((layers <= stages.most).all(0), total, np.inf)

    def energy(self, many: np.ndarray, layers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """What a search lowers, which is finite without the memory, too; and the seconds, infinite then."""
        stages = self.stages(many, quick=True)
        parts, mean = self._parts(stages, layers)
        total = sum(parts.values())
        lacks = np.maximum(layers - stages.most, 0).sum(0)
        energy = (total + _MEANS * mean) * (1 + lacks / self.load.layers)
        return energy, np.where(lacks == 0, total, np.inf)

    def split(self, nodes: np.ndarray) -> np.ndarray:
        """Layers of each stage. For each bound on a stage's seconds and on its exchange, the fill is least if the
        fastest stages take all that they may; of all bounds the best is kept, and improved layer by layer."""
        load, stages = self.load, self.stages(nodes.reshape(-1, 1))
        counts = np.arange(1, load.layers + 1)
        last = np.arange(load.stages)[:, None] == load.stages - 1
        seconds = stages.layer * counts + last * stages.last
        exchange = self.exchanged(stages, counts)
        times, rings = (_grid(values, most) for values, most in ((seconds, 200), (exchange, 25)))
        within = (seconds[..., None] <= times) & (counts[:, None] <= stages.most[..., None])  # [stage, layers, bound]
        ringed = exchange[..., None] <= rings
        caps = np.minimum(within.sum(1)[:, :, None], ringed.sum(1)[:, None, :]).reshape(load.stages, -1)
        caps = caps[:, (caps.sum(0) >= load.layers) & (caps >= 1).all(0)]
        if not caps.size:
            return _nearest(stages.most[:, 0], load.layers)
        caps = np.unique(caps, axis=1)
        layers, rest = np.ones_like(caps), np.full(caps.shape[1], load.layers - load.stages)
        for stage in np.argsort(stages.layer[:, 0], kind="stable"):
            more = np.minimum(rest, caps[stage] - 1)
            layers[stage] += more
            rest -= more
        return self._shifted(stages, layers)

    def _shifted(self, stages: _Stages, layers: np.ndarray) -> np.ndarray:
        """The best of these, with single layers moved while that helps."""

        def best_of(many: np.ndarray) -> tuple[float, np.ndarray]:
            total = sum(self.parts(stages, many).values())
            total = np.where((many <= stages.most).all(0) & (many >= 1).all(0), total, np.inf)
            found = int(total.argmin())
            return float(total[found]), many[:, found]

        now, best = best_of(layers)
        pairs = np.array(list(itertools.permutations(range(self.load.stages), 2)), int).reshape(-1, 2)
        moves = np.zeros((self.load.stages, len(pairs)), int)
        moves[pairs[:, 0], np.arange(len(pairs))], moves[pairs[:, 1], np.arange(len(pairs))] = -1, 1
        while len(pairs):
            after, other = best_of(best[:, None] + moves)
            if after >= now - 1e-12:
                break
            now, best = after, other
        return best

    def plan(self, nodes: np.ndarray, layers: np.ndarray) -> Plan:
        stages, load = self.stages(nodes.reshape(-1, 1)), self.load
        parts = {name: float(part[0]) for name, part in self.parts(stages, layers.reshape(-1, 1)).items()}
        shape = nodes[: self.used].reshape(load.stages, load.replicas)
        fits = bool((layers <= stages.most[:, 0]).all())
        placed = tuple(tuple(int(node) for node in stage) for stage in shape)
        return Plan(placed, tuple(int(count) for count in layers), sum(parts.values()), parts, fits)

    def search(self, seed: int = 0, steps: int = 100_000, also: Iterable[np.ndarray] = ()) -> Plan:
        """The best plan found: of all, if they are few. The same seed gives the same answer. `also`: more starts."""
        if math.perm(self.count, self.used) * math.comb(self.load.layers - 1, self.load.stages - 1) <= _EXHAUSTIVE:
            return self._of_all()
        chance = np.random.default_rng(seed)
        starts = [*also, *self.starts()]
        chains = _CHAINS if self.count <= _FEW else _CHAINS // 4
        for _ in range(min(chains, max(8, steps // 64)) * (steps > 0)):
            starts.append(chance.permutation(self.count))
        layers = [self.split(start) for start in starts]
        found = [self.plan(start, cut) for start, cut in zip(starts, layers, strict=True)]
        which = np.arange(chains) % len(starts)
        begin = np.array(starts).T[:, which], np.array(layers).T[:, which]
        # Where links differ little, two short searches may say enough.
        lengths = _SHORT if len(np.unique(self.near)) < self.count and steps > 4 * sum(_SHORT) else ()
        found += [self._annealed(*begin, np.random.default_rng(seed), length) for length in lengths]
        same = lengths and all(plan.fits for plan in found[-2:]) and math.isclose(*(p.seconds for p in found[-2:]))
        if steps and not same:
            found.append(self._annealed(*begin, chance, steps))
        return min(found, key=_rank)

    def _annealed(self, nodes: np.ndarray, layers: np.ndarray, chance: np.random.Generator, steps: int) -> Plan:
        order, cut = anneal(self.energy, self._apart, self.load.replicas, nodes, layers, chance, steps)
        return min(self.plan(order, cut), self.plan(order, self.split(order)), key=_rank)

    def _of_all(self) -> Plan:
        load = self.load
        cuts = [
            np.diff((0, *ends, load.layers)) for ends in itertools.combinations(range(1, load.layers), load.stages - 1)
        ]
        orders = np.array(list(itertools.permutations(range(self.count), self.used))).T
        best: tuple[float, int, int] = (np.inf, 0, 0)
        for number, layers in enumerate(cuts):
            seconds = self.seconds(orders, np.repeat(layers[:, None], orders.shape[1], 1))
            best = min(best, (float(seconds.min()), number, int(seconds.argmin())))
        return self.plan(orders[:, best[2]], cuts[best[1]])

    def starts(self) -> Iterator[np.ndarray]:
        """Regions along pipelines, regions within stages, and nodes of like speed within stages."""
        load, speed = self.load, self.load.layer
        slowest_last = np.argsort(speed, kind="stable")
        regions: dict[str, list[int]] = {}
        for node in slowest_last:
            regions.setdefault(self.network.regions[node], []).append(int(node))
        largest_first = list(itertools.chain(*sorted(regions.values(), key=len, reverse=True)))
        for order in (largest_first, self._chain()):
            first, rest = np.array(order[: self.used]), np.array(order[self.used :], int)
            yield np.concatenate([first.reshape(load.replicas, load.stages).T.ravel(), rest])
            yield np.concatenate([first, rest])
        yield slowest_last

    def _chain(self) -> list[int]:
        """Each node after the one that is nearest to it, from the one that is nearest to all."""
        apart = self.near.copy()
        np.fill_diagonal(apart, np.inf)
        order = [int(np.argmin(np.where(np.isfinite(apart), apart, 0).sum(0)))]
        apart[:, order[0]] = np.inf
        while len(order) < self.count:
            order.append(int(apart[order[-1]].argmin()))
            apart[:, order[-1]] = np.inf
        return order


def _worst(table: np.ndarray, index: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """The largest of each column of the table, along the replicas."""
    return np.moveaxis(table.take(index.reshape(shape), 0).max(1), -1, 0)


def _rank(plan: Plan) -> tuple[bool, float]:
    return not plan.fits, plan.seconds


def _grid(values: np.ndarray, most: int) -> np.ndarray:
    """The values that bounds are taken from: all, or as many spread among them."""
    found = np.unique(values)
    return found if len(found) <= most else found[np.linspace(0, len(found) - 1, most).astype(int)]


def _nearest(most: np.ndarray, layers: int) -> np.ndarray:
    """Layers where the memory does not hold them: as it would, beyond it evenly."""
    counts = np.maximum(1, most)
    while counts.sum() > layers:
        counts[counts.argmax()] -= 1
    while counts.sum() < layers:
        counts[counts.argmin()] += 1
    return counts
