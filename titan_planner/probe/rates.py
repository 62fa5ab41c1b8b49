"""From what the ranks of a probe measured to rates, by the formulas of cost.py. No torch."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import numpy as np

from titan_planner.plan.calibrate import most_likely, scaled
from titan_planner.plan.cost import Device, Layout, Machine, Rates, step
from torchtitan.config.keys.model import Model
from torchtitan.models.families import find_model
from torchtitan.models.operations import Share, Work
from torchtitan.models.split import balanced_counts

_UNLIKE = 1.1  # devices or links that are further apart are named
_NOISE = 0.05  # of a step's seconds: what the formulas leave out
# What steps say, and how far it may lie from where the fit begins: the width of a bell in its logarithm.
_OF_STEPS = {"unfused": 500.0, "layer": 500.0}
_BEHIND_LINKS = {"unfused": 1.5, "layer": 1.5}  # CPUs wait for the network in a step, which then says little of them
OF_AXES = {"tensor": 500.0, "shared": 0.7, "alone": 0.2}
Found = Mapping[str, Any]  # of one rank, from rank.py


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


def _fit(one: np.ndarray, other: np.ndarray, values: np.ndarray) -> tuple[float, float]:
    """The positive factors of two columns, whose sum comes nearest to the values by relative error."""
    columns = np.stack([one, other], 1) / values[:, None]
    best = np.linalg.lstsq(columns, np.ones(len(values)), rcond=None)[0]
    if best.min() <= 0:  # one of them alone
        alone = columns.sum(0) / (columns**2).sum(0)
        best = np.where(np.arange(2) == np.argmin(((columns * alone - 1) ** 2).sum(0)), alone, 0.0)
    first, second = np.maximum(best, 1e-12 * values.max() / np.max([one, other], axis=1))
    return float(first), float(second)


def fitted(every: Sequence[Found], per_node: int) -> Machine:
    """Of the middle rank, or of the slowest where ranks are unlike. What is measured as it is has the rate 1."""
    order = sorted(every, key=speed, reverse=True)
    found = order[-1 if apart([*map(speed, every)]) else len(order) // 2]
    product, size = product_rates(found)
    (flops, attended), (num_bytes, seconds) = found["attention"], found["moving"]
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
    machine = Machine(Device(found["peak"], num_bytes / seconds, inside, between, per_node), rates)
    return replace(machine, rates=_of_steps(machine, every))


def _of_steps(machine: Machine, every: Sequence[Found]) -> Rates:
    """Bytes of an update, and the rates that bring out a small model's steps on each axis of a layout."""
    steps = [*zip(*(found["steps"] for found in every), strict=True)]
    cases = [_case(same, every) for same in steps]
    norm = 2 * float(machine.collective(4, len(every)))  # an update begins with the sum of all ranks' norms
    updates = [
        max(0.1 * (seconds := median(each["update"] for each in same)), seconds - norm) / float(work.num_parameters)
        for same, (work, _, _) in zip(steps, cases, strict=True)
        if same[0]["axis"] == "dp"
    ]
    bandwidth = machine.device.memory_bandwidth * machine.rates.memory
    start, widths = replace(machine.rates, optimizer=median(updates) * bandwidth * len(every)), dict(_OF_STEPS)
    if every[0]["on_cpu"]:
        start = replace(start, exposed=1.0, shared=0.5)
        widths |= _BEHIND_LINKS if len(every) > machine.device.per_node else {}
    if len({same[0]["axis"] for same in steps}) > 1:
        start, widths = replace(start, tensor=1e-4), widths | OF_AXES

    def residuals(by: Mapping[str, float]) -> np.ndarray:
        here = replace(machine, rates=scaled(start, by))
        return np.array([np.log(float(step(here, work, layout).total) / measured) for work, layout, measured in cases])

    return scaled(start, most_likely(lambda by: residuals(by) / _NOISE, widths, len(widths)))


def _case(same: Sequence[Mapping[str, Any]], every: Sequence[Found]) -> tuple[Work, Layout, float]:
    """What a step of the probe computes, its layout, and its seconds."""
    first, blueprint = same[0], find_model(Model(**same[0]["model"]))
    degrees = {} if first["axis"] == "dp" else {first["axis"]: 2}
    tp, cp, pp = (degrees.get(axis, 1) for axis in ("tp", "cp", "pp"))
    counts = balanced_counts(blueprint.parts(first["length"]), pp) if pp > 1 else [0]
    sequences = 1 if pp > 1 else first["sequences"]
    layout = Layout(
        dp=len(every) // (tp * cp * pp),
        tp=tp,
        cp=cp,
        pp=pp,
        microbatches=first["sequences"] // sequences,
        most_layers=max(counts),
        last_layers=counts[-1],
        compiled=False,
        wide=2.0 if every[0]["dtype"] == "float32" else 1.0,
    )
    assert blueprint.spec.operations is not None
    work: Work = blueprint.spec.operations(blueprint.shape, Share(sequences, first["length"], tp, cp))
    return work, layout, median(each["step"] for each in same)


def middle(every: Sequence[Found], name: str) -> list[list[float]]:
    return [np.median(same, axis=0).tolist() for same in zip(*(found[name] for found in every), strict=True)]


def speed(found: Found) -> float:
    return float(1 / np.exp(np.mean(np.log(np.array(found["products"])[:, 3]))))


def apart(values: Sequence[float]) -> bool:
    return max(values) > _UNLIKE * min(values)
