"""Networks of unlike devices and links, as files describe them: groups and pairs, matrices, or Ravnest's nodes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tomli

from titan_planner.plan.cluster import describes, read_toml
from torchtitan.refusal import Refusal

_ALIKE = ("kind", "tflops", "memory_gib", "memory_gbytes_per_second", "inside_gbytes_per_second")
_MOST = 4096  # nodes: their links are matrices
_UNLIKE_KEYS = {"groups", "delay_ms", "case"}


@dataclass(frozen=True)
class Sheet:
    """What is known of a node's devices, which are alike. None: the file does not say it."""

    kind: str = "device"
    tflops: float | None = None
    memory_gib: float | None = None
    memory_gbytes_per_second: float | None = None
    inside_gbytes_per_second: float | None = None

    def __post_init__(self) -> None:
        for name in _ALIKE[1:]:
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not 0 < value < float("inf")):
                raise Refusal(f"{name} = {value!r}; use a positive number")


@dataclass(frozen=True)
class Network:
    """Delay in seconds and bandwidth in Gbit/s, from each node (row) to each, and each node's region.

    A node is what is placed: one device, or `per_node` of them with fast links between them.
    """

    delay: np.ndarray
    bandwidth: np.ndarray
    regions: tuple[str, ...]
    names: tuple[str, ...] = ()
    sheets: tuple[Sheet, ...] = ()
    per_node: int = 1

    def there_and_back(self, gigabytes: float) -> np.ndarray:
        """Seconds; zero between a node and itself."""
        one_way = self.delay + 8 * gigabytes / self.bandwidth
        both = one_way + one_way.T
        np.fill_diagonal(both, 0.0)
        return both

    def of(self, key: str, otherwise: float) -> np.ndarray:
        """A number of each node's sheet."""
        values = [getattr(sheet, key) for sheet in self.sheets] or [None] * len(self.regions)
        return np.array([otherwise if value is None else value for value in values], float)

    def without(self, node: int) -> "Network":
        return self.only([other for other in range(len(self.regions)) if other != node])

    def only(self, nodes: Sequence[int]) -> "Network":
        return Network(
            self.delay[nodes][:, nodes],
            self.bandwidth[nodes][:, nodes],
            tuple(self.regions[node] for node in nodes),
            tuple(self.names[node] for node in nodes),
            tuple(self.sheets[node] for node in nodes),
            self.per_node,
        )


def is_unlike(path: Path) -> bool:
    """Whether a cluster file lists unlike nodes or links; a file of like nodes has one [device]."""
    if path.suffix == ".json":
        return True
    try:
        return bool(_UNLIKE_KEYS & set(tomli.loads(path.read_text(encoding="utf-8"))))
    except (OSError, ValueError):
        return False  # who reads it next says so


def read_cluster_network(path: Path) -> tuple[str, Network, str]:
    """The name, the nodes, and what the numbers rest on."""
    if path.suffix == ".json":
        return path.stem, ravnest_network(path), "Ravnest's file: bandwidth by node; it says nothing of speed and delay"
    tables = read_toml(path)
    with describes(path, "cluster"):
        cases = tables.get("case", [tables])
        if len(cases) != 1:
            raise Refusal(f"--cluster {path} has {len(cases)} cases; a cluster is one, so keep one [[case]]")
        network = to_network(cases[0])
    return (
        str(cases[0].get("name", path.stem)),
        network,
        str(tables.get("rests_on", "the file's figures and the data sheets")),
    )


def read_cases(path: Path) -> list[tuple[str, Network, Mapping[str, Any]]]:
    """The networks of a file, with what the file says of each: groups of devices and pairs of regions, or matrices."""
    with describes(path, "network"):
        return [(str(case.get("name", "network")), to_network(case), case) for case in read_toml(path)["case"]]


def to_network(case: Mapping[str, Any]) -> Network:
    if "delay_ms" in case:
        delay, bandwidth = np.array(case["delay_ms"], float) / 1e3, np.array(case["gbit"], float)
        count = len(delay)
        if delay.shape != bandwidth.shape or delay.shape != (count, count):
            raise Refusal(
                f"delay_ms is {delay.shape} and gbit {bandwidth.shape}; both have a row and a column for each node"
            )
        regions = tuple(map(str, case.get("regions", range(count))))
        sheets = tuple(_sheet(case, number, count) for number in range(count))
        per_node = int(case.get("per_node", 1))
    else:
        if (asked := sum(map(_nodes, case["groups"]))) > _MOST:
            raise Refusal(f"groups have {asked} nodes; at most {_MOST} are planned, so make nodes of several devices")
        groups = [(number, group) for number, group in enumerate(case["groups"]) for _ in range(_nodes(group))]
        links = np.array([[_link(case, one, other) for other in groups] for one in groups], float)
        delay, bandwidth, count = links[..., 0] / 1e3, links[..., 1], len(groups)
        regions = tuple(group["region"] for _, group in groups)
        sheets = tuple(Sheet(**{key: group[key] for key in _ALIKE if key in group}) for _, group in groups)
        sizes = {int(group.get("per_node", 1)) for _, group in groups}
        if len(sizes) > 1:
            raise Refusal(
                f"groups have nodes of {', '.join(map(str, sorted(sizes)))} devices; the launcher starts equally many "
                "processes on each node, so give all groups one per_node"
            )
        per_node = sizes.pop() if sizes else 1
    apart = ~np.eye(count, dtype=bool)
    if count == 0 or not (bandwidth[apart] > 0).all() or not (delay[apart] >= 0).all():
        raise Refusal("a link has a bandwidth of 0 or less, or a delay below 0; give each link [ms, Gbit/s] above that")
    names = tuple(map(str, case.get("names", _numbered(regions))))
    if not len(names) == len(set(names)) == len(regions) == count:
        raise Refusal(f"{count} nodes have {len(set(names))} names and {len(regions)} regions; give each node its own")
    np.fill_diagonal(bandwidth, np.inf)
    np.fill_diagonal(delay, 0.0)
    return Network(delay, bandwidth, regions, names, sheets, per_node)


def _nodes(group: Mapping[str, Any]) -> int:
    nodes, rest = divmod(group["devices"], group.get("per_node", 1))
    if rest:
        raise Refusal(f"{group['region']} has {group['devices']} devices, which is no multiple of its per_node")
    return int(nodes)


def _numbered(regions: Sequence[str]) -> list[str]:
    seen: dict[str, int] = {}
    names = []
    for region in regions:
        names.append(f"{region}-{seen.get(region, 0)}")
        seen[region] = seen.get(region, 0) + 1
    return names


def _sheet(case: Mapping[str, Any], number: int, count: int) -> Sheet:
    """A key of matrices is one value, or a list with one for each node."""
    found = {}
    for key in _ALIKE:
        if key in case:
            value = case[key]
            if isinstance(value, list) and len(value) != count:
                raise Refusal(f"{key} has {len(value)} values for {count} nodes; give one for each, or one number")
            found[key] = value[number] if isinstance(value, list) else value
    return Sheet(**found)


def _link(case: Mapping[str, Any], one: tuple[int, Mapping], other: tuple[int, Mapping]) -> Sequence[float]:
    """Of a pair: as `A-B` from A to B if `B-A` is given, too, else in both directions."""
    if one[0] == other[0]:
        return one[1]["inside"]
    names = one[1]["region"], other[1]["region"]
    pairs = case.get("pairs", {})
    found = pairs.get("-".join(names)) or pairs.get("-".join(reversed(names))) or case.get("outside")
    if found is None:
        raise Refusal(f"the network says nothing of {names[0]} and {names[1]}; give the pair, or `outside`")
    return found


def ravnest_network(path: Path) -> Network:
    """Ravnest's node_configs.json: `ram` in GB, `bandwidth` in Mbit/s; a link is as fast as its slower end."""
    from titan_planner.places.ravnest import read_providers

    providers = read_providers(path)
    own = np.array([provider.megabits for provider in providers], float) / 1e3
    bandwidth = np.minimum(own[:, None], own[None, :])
    np.fill_diagonal(bandwidth, np.inf)
    return Network(
        np.zeros_like(bandwidth),
        bandwidth,
        tuple(provider.name for provider in providers),
        tuple(provider.name for provider in providers),
        tuple(Sheet(memory_gib=provider.megabytes / 1024) for provider in providers),
    )
