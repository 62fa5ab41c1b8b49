"""How far the search of `plan place` stays above the best known, on irregular networks drawn at random.

    python -m benchmarks.planner.irregular_networks --sizes 16 32 64 --draws 4 --long 8

For each network the search runs once, as `plan place` does. The best known is the least of that, of `--long` runs with
other seeds, and of a second method: descent over all swaps, begun again after random kicks.
"""

import argparse
import itertools
import time

import numpy as np

from titan_planner.places.network import Network, Sheet
from titan_planner.places.pipelines import Load, Pipelines

DEVICES = (  # TFLOP/s of dense products in 16 bits, and GiB
    Sheet("A100", 312, 40),
    Sheet("A100 80", 312, 80),
    Sheet("V100", 125, 32),
    Sheet("T4", 65, 16),
    Sheet("A10", 125, 24),
    Sheet("RTX 4090", 165, 24),
)


def draw_network(count: int, seed: int) -> Network:
    """Nodes at random places on a globe, half of them at a place that another has; links slower the farther they go."""
    chance = np.random.default_rng(seed)
    places = chance.normal(size=(count, 3))
    places /= np.linalg.norm(places, axis=1, keepdims=True)
    sites = np.where(chance.random(count) < 0.5, np.arange(count), chance.integers(0, count, count))
    sites = sites[sites]
    places = places[sites]
    kilometres = 6371 * np.arccos(np.clip(places @ places.T, -1, 1))
    delay = 1e-3 * (0.5 + kilometres / 100) * chance.uniform(1.0, 1.3, (count, count))  # 2/3 of light's speed, detours
    bandwidth = 8 / (1 + kilometres / 1000) * chance.lognormal(0, 0.6, (count, count))
    near = kilometres < 1
    delay, bandwidth = np.where(near, 1e-4, delay), np.where(near, 10.0, bandwidth)
    np.fill_diagonal(delay, 0)
    np.fill_diagonal(bandwidth, np.inf)
    sheets = tuple(DEVICES[chance.integers(len(DEVICES))] for _ in range(count))
    return Network(delay, bandwidth, tuple(f"site{site}" for site in sites), tuple(map(str, range(count))), sheets)


def draw_load(network: Network, stages: int, replicas: int) -> Load:
    """A model of three layers a stage and 0.2e9 parameters a layer; 4 microbatches for each stage."""
    flops, memory = network.of("tflops", 100) * 1e12 * 0.4, network.of("memory_gib", 16)
    parameters, layers, microbatches = 0.2e9, 3 * stages, 4 * stages
    waiting = np.arange(stages, 0, -1)  # microbatches, under 1F1B
    each = 16 * parameters / 2**30 / replicas + 8 * parameters / 2**30 + 0.25 * waiting  # GiB of a layer
    most = np.floor(0.9 * memory[:, None] / each).astype(int)
    seconds = 6 * parameters * 4096 / flops
    return Load(
        stages, replicas, layers, seconds, 0.5 * seconds, most, 2 * 4096 * 4096 / 1e9, 6 * parameters / 1e9,
        microbatches=microbatches,
    )  # fmt: skip


def descend(problem: Pipelines, seed: int, seconds: float) -> float:
    """The second method: the best of all swaps and shifts while one helps, then a kick; no heat."""
    chance, began = np.random.default_rng(seed), time.process_time()
    load, used = problem.load, problem.used
    pairs = np.array([(a, b) for a in range(used) for b in range(a + 1, problem.count)])
    shifts = np.array(list(itertools.permutations(range(load.stages), 2)))
    size = len(pairs) + len(shifts)
    best, here = np.inf, np.stack([chance.permutation(problem.count) for _ in range(1)])[0]
    kept, kept_value = (here, problem.split(here)), np.inf
    while time.process_time() - began < seconds:
        here, layers, value = kept[0].copy(), kept[1].copy(), np.inf
        for _ in range(int(chance.integers(2, 8)) if kept_value < np.inf else 0):
            a, b = chance.integers(0, used), chance.integers(0, problem.count)
            here[a], here[b] = here[b], here[a]
        if chance.random() < 0.5:
            layers = problem.split(here)
        while time.process_time() - began < seconds:
            many, cuts = np.repeat(here[:, None], size, 1), np.repeat(layers[:, None], size, 1)
            rows = np.arange(len(pairs))
            many[pairs[:, 0], rows], many[pairs[:, 1], rows] = here[pairs[:, 1]], here[pairs[:, 0]]
            rows = np.arange(len(pairs), size)
            cuts[shifts[:, 0], rows] -= 1
            cuts[shifts[:, 1], rows] += 1
            energies, total = problem.energy(many, cuts)
            energies = np.where((cuts >= 1).all(0), energies, np.inf)
            total = np.where((cuts >= 1).all(0), total, np.inf)
            best = min(best, float(total.min()))
            found = int(energies.argmin())
            if energies[found] >= value - 1e-12:
                break
            here, layers, value = many[:, found].copy(), cuts[:, found].copy(), float(energies[found])
        if value < kept_value:
            kept, kept_value = (here, layers), value
        elif chance.random() < 0.02:
            kept, kept_value = (chance.permutation(problem.count), layers), np.inf
    return best


SHAPES = {16: (4, 4), 32: (8, 4), 64: (8, 8)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SHAPES), choices=SHAPES, help="nodes")
    parser.add_argument("--draws", type=int, default=3, help="networks of each size (default: %(default)s)")
    parser.add_argument("--long", type=int, default=3, help="other seeds (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=100_000, help="of each search at length (default: %(default)s)")
    parser.add_argument("--descent", type=float, default=20, help="seconds of the second method (default: %(default)s)")
    args = parser.parse_args()
    gaps = []
    print("nodes  network  seconds a step  best known    gap  search, s of CPU", flush=True)
    for size in args.sizes:
        for draw in range(args.draws):
            network = draw_network(size, draw)
            problem = Pipelines(network, draw_load(network, *SHAPES[size]))
            began = time.process_time()
            found = problem.search(0, args.steps)
            took = time.process_time() - began
            known = [problem.search(seed, args.steps).seconds for seed in range(1, args.long + 1)]
            best = min([found.seconds, descend(problem, draw, args.descent), *known])
            gaps.append(found.seconds / best - 1)
            assert found.fits
            print(f"{size:5} {draw:8} {found.seconds:15.3f} {best:11.3f} {gaps[-1]:6.2%} {took:17.1f}", flush=True)
    print(f"mean gap {np.mean(gaps):.2%}, largest {max(gaps):.2%}")


if __name__ == "__main__":
    main()
