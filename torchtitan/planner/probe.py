"""From what the ranks of a probe measured to rates, by the formulas of cost.py. No torch."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import numpy as np

from torchtitan.config.keys_model import Model
from torchtitan.models.families import find_model
from torchtitan.models.operations import Share
from torchtitan.planner.cost import Device, Layout, Machine, Rates, step

_UNLIKE = 1.1  # devices or links that are further apart are named
Found = Mapping[str, Any]  # of one rank, from verbs/probe_rank.py


def product_rates(found: Found) -> tuple[float, float]:
    """`product` and `size`: seconds over those at the peak are (1 + size / smallest side) / product."""
    table = np.array(found["products"])
    slower = table[:, 3] * found["peak"] / (2 * table[:, :3].prod(axis=1))
    whole, narrow = _fit(np.ones(len(table)), 1 / table[:, :3].min(axis=1), slower)
    return 1 / whole, narrow / whole


def link(points: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Seconds of delay, and bytes a second, of collectives given as [ranks, bytes, seconds]."""
    ranks, size, seconds = np.array(points).T
    delay, slope = _fit(np.ones(len(ranks)), (ranks - 1) / ranks * size, seconds)
    return delay, 1 / slope


def _fit(one: np.ndarray, other: np.ndarray, values: np.ndarray, base: Any = 0.0) -> tuple[float, float]:
    """The positive factors of two columns, whose sum above a base comes nearest to the values by relative error.

    A column of zeros has the factor 0: the values say nothing of it.
    """
    columns, rest = np.stack([one, other], 1) / values[:, None], 1 - np.asarray(base) / values
    best = np.linalg.lstsq(columns, rest, rcond=None)[0]
    if best.min() <= 0:  # one of them alone
        alone = np.array([max(0.0, column @ rest / ((column @ column) or 1.0)) for column in columns.T])
        errors = [float(((column * factor - rest) ** 2).sum()) for column, factor in zip(columns.T, alone, strict=True)]
        best = np.where(np.arange(2) == np.argmin(errors), alone, 0.0)
    largest = np.abs([one, other]).max(axis=1)
    first, second = np.maximum(best, 1e-12 * np.abs(values).max() / np.where(largest, largest, np.inf))
    return float(first), float(second)


def fitted(every: Sequence[Found], per_node: int) -> Machine:
    """Of the middle rank, or of the slowest where ranks are unlike. What is measured as it is has the rate 1."""
    order = sorted(every, key=speed, reverse=True)
    found = order[-1 if apart([*map(speed, every)]) else len(order) // 2]
    product, size = product_rates(found)
    (flops, attended), (moved, seconds) = found["attention"], found["moving"]
    rates = Rates(product=product, size=size, memory=1.0, inside=1.0, between=1.0)
    rates = replace(rates, attention=3.5 * flops / attended / found["peak"])
    nodes, inside, between = len(every) // per_node, 1e12, 1e12
    if per_node > 1:
        delay, inside = link(middle(every, "inside"))
        plain, fsdp = (sum(seconds for *_, seconds in middle(every, name)) for name in ("inside", "fsdp"))
        rates = replace(rates, latency=delay, fsdp=fsdp / plain if fsdp else 1.0)
    if nodes > 1:
        one, (delay, whole) = link(middle(every, "across"))[1], link(middle(every, "all"))
        between = float(np.sqrt(one * whole / per_node)) if whole < 0.95 * inside else one
        rates = replace(rates, hop=max(1e-7, (delay - rates.latency) / (nodes - 1)))
    between = between if nodes > 1 else inside  # then nothing uses it
    machine = Machine(Device(found["peak"], moved / seconds, inside, between, per_node), rates)
    return replace(machine, rates=_of_steps(machine, every))


def _of_steps(machine: Machine, every: Sequence[Found]) -> Rates:
    """Bytes of an update, passes without a compiler, and a layer's own time, so that a small model's steps come out."""
    rates, steps = machine.rates, [*zip(*(found["steps"] for found in every), strict=True)]
    seconds = np.array([median(each["step"] for each in same) for same in steps])
    layout = Layout(dp=len(every), compiled=False, wide=2.0 if every[0]["dtype"] == "float32" else 1.0)
    works = []
    for same in steps:
        blueprint, update = find_model(Model(**same[0]["model"])), median(each["update"] for each in same)
        assert blueprint.spec.operations is not None
        works.append(blueprint.spec.operations(blueprint.shape, Share(same[0]["sequences"], same[0]["length"])))
        bandwidth = machine.device.memory_bandwidth * machine.rates.memory
        rates = replace(rates, optimizer=update * bandwidth * len(every) / works[-1].num_parameters)

    def totals(unfused: float, layer: float) -> np.ndarray:
        here = replace(machine, rates=replace(rates, unfused=unfused, layer=layer))
        return np.array([float(step(here, work, layout).total) for work in works])

    passes, own = rates.unfused, rates.layer
    for _ in range(5):  # a step has the larger of two times in it, and so is linear in pieces
        now = totals(passes, own)
        slopes = totals(passes * 1.001, own) - now, totals(passes, own * 1.001) - now
        slopes = slopes[0] / (0.001 * passes), slopes[1] / (0.001 * own)
        found = _fit(*slopes, seconds, now - slopes[0] * passes - slopes[1] * own)
        passes, own = found[0] or passes, found[1] or own
    return replace(rates, unfused=passes, layer=own)


def middle(every: Sequence[Found], name: str) -> list[list[float]]:
    return [np.median(same, axis=0).tolist() for same in zip(*(found[name] for found in every), strict=True)]


def speed(found: Found) -> float:
    return float(1 / np.exp(np.mean(np.log(np.array(found["products"])[:, 3]))))


def apart(values: Sequence[float]) -> bool:
    return max(values) > _UNLIKE * min(values)
