"""Clusters of unlike providers, each of which holds the whole model, as Ravnest forms them."""

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torchtitan.refusal import Refusal

_PENALTY = 100  # of a MB that a cluster lacks, in Ravnest's cost
MOST_CLUSTERS = 5  # that Ravnest considers


@dataclass(frozen=True)
class Provider:
    name: str
    megabytes: int
    megabits: int  # a second


def read_providers(path: Path) -> list[Provider]:
    """Ravnest's node_configs.json, in which `ram` is in GB and `bandwidth` in Mbit/s."""
    try:
        nodes = json.loads(path.read_text())
        return [
            Provider(name, int(node["benchmarks"]["ram"] * 1024), node["benchmarks"]["bandwidth"])
            for name, node in nodes.items()
        ]
    except (OSError, ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise Refusal(f"{path} is not a node_configs.json of Ravnest: {type(error).__name__}: {error}") from None


def ravnest_cost(clusters: Sequence[Sequence[Provider]], model_megabytes: float) -> float:
    """What Ravnest minimises. One cluster of all always costs 0, so nothing in it asks for more of them."""
    lacking = sum(max(0.0, model_megabytes - sum(p.megabytes for p in cluster)) for cluster in clusters)
    return _PENALTY * lacking + unevenness(clusters)


def unevenness(clusters: Sequence[Sequence[Provider]]) -> int:
    times = [sum(p.megabytes // p.megabits for p in cluster) for cluster in clusters]
    return max(times) - min(times)


def rewarded_cost(clusters: Sequence[Sequence[Provider]], model_megabytes: float) -> float:
    """Seconds of the slowest cluster, over how many train at once: the count is rewarded.

    Missing memory costs the same as in Ravnest's formula.
    """
    lacking = ravnest_cost(clusters, model_megabytes) - unevenness(clusters)
    slowest = max(sum(p.megabytes / p.megabits for p in cluster) for cluster in clusters)
    return lacking + slowest / len(clusters)


def form_clusters(providers: Sequence[Provider], model_megabytes: float) -> list[list[Provider]]:
    """As many clusters as can hold the model, up to Ravnest's five, and among those as even as a local search finds.

    Each cluster trains a whole model on its own data, so a cluster more is worth more than evenness.
    """
    if sum(p.megabytes for p in providers) < model_megabytes:
        raise Refusal(
            f"all providers together have {sum(p.megabytes for p in providers) / 1024:.1f} GB, but the model needs "
            f"{model_megabytes / 1024:.1f}; add providers"
        )
    for count in range(min(MOST_CLUSTERS, len(providers)), 0, -1):
        clusters = spread(providers, count, model_megabytes)
        if ravnest_cost(clusters, model_megabytes) == unevenness(clusters):  # none lacks memory
            return clusters
    raise AssertionError("one cluster of all holds the model")


def spread(providers: Sequence[Provider], count: int, model_megabytes: float) -> list[list[Provider]]:
    """The largest first, each to the cluster that has least; then moves and swaps while they lower the cost."""
    clusters: list[list[Provider]] = [[] for _ in range(count)]
    for provider in sorted(providers, key=lambda p: -p.megabytes):
        min(clusters, key=lambda cluster: sum(p.megabytes for p in cluster)).append(provider)
    best, improves = ravnest_cost(clusters, model_megabytes), True
    while improves:
        improves = False
        for one, other in itertools.permutations(range(count), 2):
            for given, taken in itertools.product(list(clusters[one]), [None, *clusters[other]]):
                changed = [list(cluster) for cluster in clusters]
                changed[one].remove(given)
                changed[other].append(given)
                if taken is not None:
                    changed[other].remove(taken)
                    changed[one].append(taken)
                if all(changed) and (cost := ravnest_cost(changed, model_megabytes)) < best:
                    clusters, best, improves = changed, cost, True
                    break
            if improves:
                break
    return clusters
