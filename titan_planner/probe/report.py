"""The cluster file of a probe, and what it says of unlike devices and links. No torch."""

import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w

from titan_planner.probe.rates import OF_AXES, Found, apart, fitted, middle, speed
from torchtitan.refusal import Refusal
from torchtitan.whole_file import write_whole

_NOT_MEASURED = ("float8", "overlap")


def matrices(every: Sequence[Found], nodes: int, inside: float) -> tuple[np.ndarray, np.ndarray]:
    """Delay in ms and Gbit/s from each node to each. A pair that was not measured gets the median."""
    pairs = {(int(a), int(b), size): seconds for found in every for a, b, size, seconds in found["pairs"]}
    delay, gbit = np.full((nodes, nodes), np.nan), np.full((nodes, nodes), np.nan)
    small = min((size for *_, size in pairs), default=0)
    for (a, b, size), seconds in pairs.items():
        if size == small:
            delay[a, b] = delay[b, a] = 1e3 * seconds / 2  # a message and its answer
        else:
            gbit[a, b] = 8e-9 * (size - small) / max(1e-9, seconds - pairs[min(a, b), max(a, b), small])
    for matrix, own in ((delay, 0.0), (gbit, 8e-9 * inside)):
        np.fill_diagonal(matrix, np.nan)
        matrix[np.isnan(matrix)] = np.nanmedian(matrix) if pairs else 0.0
        np.fill_diagonal(matrix, own)
    return delay, gbit


def unlike(every: Sequence[Found], gbit: np.ndarray) -> list[str]:
    """What a plan for like devices and links would get wrong."""
    off = [(a, b) for a in range(len(gbit)) for b in range(len(gbit)) if a != b]
    kinds = {
        "products": {f"rank {rank}": speed(found) for rank, found in enumerate(every)},
        "bytes a second of memory": {
            f"rank {r}": found["moving"][0] / found["moving"][1] for r, found in enumerate(every)
        },
        "usable memory": {f"rank {rank}": found["bytes"] for rank, found in enumerate(every)},
        "bandwidth": {f"the link from node {a} to node {b}": gbit[a, b] for a, b in off},
    }
    said = []
    for what, values in kinds.items():
        if values and apart([*values.values()]):
            low, high = min(values, key=values.__getitem__), max(values, key=values.__getitem__)
            said.append(f"{low} has {values[low] / values[high]:.0%} of the {what} of {high}")
    return said


def tables(every: Sequence[Found], per_node: int) -> dict[str, Any]:
    """The cluster file, but for where it comes from. Unlike nodes are a [[case]], by which a plan places stages."""
    machine, nodes, first = fitted(every, per_node), len(every) // per_node, every[0]
    device, rates = machine.device, asdict(machine.rates)
    has_axes = any(step["axis"] != "dp" for step in first["steps"])
    delay, gbit = matrices(every, nodes, device.inside)
    peaks = [max(2e-12 * m * n * k / seconds for m, n, k, seconds in found["products"]) for found in every]
    moved = [found["moving"][0] / found["moving"][1] / 1e9 for found in every]
    memory, said = [found["bytes"] / 2**30 for found in every], unlike(every, gbit)
    links = {"delay_ms": delay.tolist(), "gbit": gbit.tolist()} if nodes > 1 else {}

    def of_nodes(values: Sequence[float]) -> list[float]:
        return [min(values[node * per_node :][:per_node]) for node in range(nodes)]

    case = links | {
        "per_node": per_node,
        "kind": [found["device"] for found in every[::per_node]],
        "tflops": [device.flops / 1e12 * each / min(peaks) for each in of_nodes(peaks)],
        "memory_gib": of_nodes(memory),
        "memory_gbytes_per_second": of_nodes(moved),
        "inside_gbytes_per_second": device.inside / 1e9,
    }
    return {
        "name": f"{nodes} node{'s' * (nodes > 1)} of {per_node} {first['device']}",
        "device": {
            "name": first["device"],
            "tflops": device.flops / 1e12,
            "memory_gib": min(memory),
            "memory_gbytes_per_second": device.memory_bandwidth / 1e9,
        },
        "nodes": {"count": nodes, "devices": per_node},
        "links": {
            "inside_gbytes_per_second": device.inside / 1e9,
            "between_gbit_per_device": device.between * 8e-9,
        },
        "rates": {
            name: rate
            for name, rate in rates.items()
            if name not in _NOT_MEASURED and (has_axes or name not in OF_AXES)
        },
        "probe": {
            "unlike": said,
            "ranks": {"tflops": peaks, "memory_gib": memory, "memory_gbytes_per_second": moved},
            "products": first["products"],  # of rank 0, as all others below
            "tflops": {dtype: speed / 1e12 for dtype, speed in first["speeds"].items()},
            "collectives": {group: middle(every, group) for group in ("inside", "fsdp", "across", "all")},
            "steps": [*map(dict, first["steps"])],
        }
        | links,
    } | ({"case": [case]} if said and nodes > 1 else {})


def write(path: Path, every: Sequence[Found], per_node: int, torch_version: str, seconds: float) -> None:
    dtype, found = every[0]["dtype"], tables(every, per_node)
    today = time.strftime("%Y-%m-%d")
    about = {"rests_on": f"a probe of {today} with torch {torch_version} in {dtype}"}
    save(path, tomli_w.dumps(about | _rounded(found)))
    for line in found["probe"]["unlike"]:
        print(f"unlike: {line}")
    print(f"{path}: {found['name']}, measured in {dtype} in {seconds:.0f} s")


def save(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text)
    except OSError as error:
        raise Refusal(f"--out {path} cannot be written: {error.strerror}; use another file") from None


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_rounded(each) for each in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value
