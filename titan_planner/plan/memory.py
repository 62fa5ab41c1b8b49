"""Bytes that a rank of a layout holds at its peak, in closed form; a number may be an array.

The peak is one of a few moments of a step. Each is a sum of what is held throughout, weights that FSDP has gathered,
gradients and activations, so the dry run's kinds of bytes are the same (tests/planner/test_plan_memory.py compares).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from titan_planner.plan.cost import Layout
from titan_planner.plan.pipeline.waiting import COUNTED, UNITS, first_rounds, moments
from torchtitan.models.operations import Number, Work

Sizes = tuple[np.ndarray, list[str]]  # of each thing in COUNTED: bytes by layout, and the kind


@dataclass(frozen=True)
class Held:
    """Bytes of each layout at its fullest moment, and of one layout by kind, with the moment's name."""

    peak: np.ndarray
    at: Callable[[int], tuple[str, dict[str, float]]]


_MOMENTS = (
    "the loss",
    "the exchange of the output layer",
    "the last layer's backward",
    "the first layer's backward",
    "the table's backward",
)


def whole(work: Work, layout: Layout) -> Held:
    """A rank with the whole model, which takes one local batch after another."""
    shards, experts = layout.dp * layout.cp, work.num_layers * work.layer.experts
    own = 4 * work.num_parameters / shards + 4 * experts / layout.expert_shards
    kept, working, of_layer = _backward(work, layout)
    waiting = work.num_layers * kept
    activations = waiting + work.ends.kept["none"], waiting + work.sent, waiting + working, kept + working, 0.0
    is_alone = (shards * layout.tp * layout.replicas == 1) & (layout.regathers == 1)
    parameters, gradients = (
        [np.where(is_alone, here, shared) for here, shared in zip(*both, strict=True)]
        for both in zip(_of_one_rank(work, layout, own, of_layer), _of_shards(work, layout, own, of_layer), strict=True)
    )
    held = zip(parameters, gradients, activations, strict=True)
    return _fullest(
        {
            name: _kinds(weights, of_them, layout.states / 4 * own, kept)
            for name, (weights, of_them, kept) in zip(_MOMENTS, held, strict=True)
        },
        own,
        (shards == 1) & (layout.tp * layout.replicas > 1),
    )


def _of_shards(work: Work, layout: Layout, own: np.ndarray, of_layer: Number) -> tuple[list[Number], list[Number]]:
    """Weights and gradients at each moment where FSDP gathers and scatters them."""
    shards, layer, out = layout.dp * layout.cp, work.layer.parameters, work.ends.parameters
    experts, of_experts = work.layer.experts, work.num_layers * work.layer.experts
    # Weights that stay gathered, or cast: of all units that backward has not reached.
    stays_too = (layout.expert_shards == 1) | (layout.regathers == 0)
    one = np.where(stays_too, 2 * of_experts, 2 * experts)  # experts that are gathered in the last layer
    stays, table = (shards == 1) | (layout.regathers == 0), np.where(layout.regathers == 0, 2 * work.lookup, 0)
    every = 2 * (work.num_parameters - work.lookup) + table  # backward of a lookup needs no weights
    many, replicated = layout.microbatches > 1, layout.replicas > 1
    reads = np.where(shards > 1, 4.0, 0.0)  # bytes a parameter that a scatter reads; one rank has nothing to scatter
    scattered, new = np.where(many, own, 4 * out / shards), np.where(many, 4 * out / shards, 0)
    summed = np.where(many & replicated, own, 0)  # over the replicas; torch keeps it until backward ends
    before = (
        own - 4 * (layer + work.lookup) / shards - 4 * experts / layout.expert_shards
    )  # of all units that the first layer's backward follows
    # A tied table's gathered weight and the output layer's gradient wait for the lookup's gradient, of which DTensor
    # makes all rows before it takes the rank's, and for their sum.
    tied = np.where(work.is_tied, 2 * (layout.tp + (layout.tp > 1)) + 4 + 2 * layout.regathers, 0) * work.lookup
    tied = tied + reads * layer - np.where(many, 0, 4 * work.lookup / shards)
    parameters = [
        own + np.where(stays, every, 2 * (out + layer)) + one,
        own + np.where(stays, every - 2 * out, 2 * layer) + one,
        own + np.where(stays, every - 2 * out, 4 * layer) + one,
        own + table + 2 * layer + 2 * experts,
        own + table,
    ]
    return parameters, [
        np.where(many, own, 0) + 2 * out,  # those of the local batches before
        scattered + new + (2 + reads) * out,
        scattered + np.where(replicated, new, 0) + reads * out + of_layer,
        np.where(many, own, before) + np.where(many & replicated, before, 0) + (reads + 2) * layer,
        own + summed + np.maximum((reads + 2) * work.lookup, tied),
    ]


def _of_one_rank(work: Work, layout: Layout, own: np.ndarray, of_layer: Number) -> tuple[list[Number], list[Number]]:
    """Weights and gradients at each moment where the rank itself casts weights, and their gradients back."""
    layer, lookup, out = work.layer.parameters + work.layer.experts, work.lookup, work.ends.parameters
    total = work.num_parameters + work.num_layers * work.layer.experts
    # A tied table's cast, and then the output layer's gradient, wait for the lookup's backward.
    table, last = np.where(work.is_tied, 2 * lookup, 0), np.where(work.is_tied, 0, out)
    first = np.where(layout.states == 4, 2, 4)  # moments in 16 bits take a first gradient in 16 bits, too
    # Bytes of a weight's gradient: before this local batch, after it, and while the new one is added.
    was = np.where(layout.microbatches == 1, 0, np.where(layout.microbatches == 2, first, 4))
    now = np.where(layout.microbatches == 1, first, 4)
    adds = np.where(now == 2, 2, np.where(was == 2, 8, 6))
    casts = 2 * (total - lookup) + table
    parameters = [own + casts, *[own + casts - 2 * last] * 2, own + 2 * layer + table, own + table]
    return parameters, [
        was * total + 2 * out,
        was * (total - last) + adds * last + table,
        was * (total - last) + now * last + table + of_layer,
        was * (layer + lookup) + now * (total - layer - lookup) + table + 2 * work.layer.parameters,
        now * (total - lookup) + np.where(work.is_tied, was + 6, adds) * lookup,
    ]


def _fullest(moments: dict[str, dict[str, Number]], own: np.ndarray, is_cast: np.ndarray) -> Held:
    def at(index: int) -> tuple[str, dict[str, float]]:
        one = {
            name: {kind: float(np.broadcast_to(size, own.shape)[index]) for kind, size in kinds.items()}
            for name, kinds in moments.items()
        }
        name = max(one, key=lambda name: sum(one[name].values()))
        cast = one[name]["parameters"] - float(own[index])
        one[name]["parameters"] -= cast
        one[name][_seen("parameters", is_cast[index])] += cast
        return name, one[name]

    return Held(np.max([sum(kinds.values()) for kinds in moments.values()], axis=0), at)


def in_arrays(layout: Layout, length: int = 1) -> Layout:
    """So many times the same layout, as the functions here take it."""
    given = {field.name: getattr(layout, field.name) for field in fields(layout)}
    numbers: dict[str, Any] = {name: np.full(length, n) for name, n in given.items() if type(n) in (int, float)}
    return replace(layout, **numbers)


def staged(
    work: Work, layout: Layout, sized: Sizes, layers: Sequence[tuple[int, ...]], which: np.ndarray, rank: Number
) -> Held:
    """A rank of a pipeline. `layers`: of each stage of the rank, by `which`.

    Every moment is counts times sizes, so layouts with the same pipeline are one product of matrices.
    """
    shards, (sizes, kinds) = layout.dp * layout.cp, sized
    is_first, is_last = np.equal(rank, 0), np.equal(rank, layout.pp - 1)
    sums = np.array([sum(own) for own in layers])[which]
    every = sums * work.layer.parameters + is_first * work.lookup + is_last * work.ends.parameters
    own = 4 * every / shards + 4 * sums * work.layer.experts / layout.expert_shards
    passed = layout.passes > 1
    # torch's stages allocate a buffer for each message of a pass that they receive.
    always = _kinds(
        own,
        np.where(passed, own, 0),
        layout.states / 4 * own,
        work.sent * layout.microbatches * (2 * layout.stages_per_rank - is_first - is_last),
    )

    few = np.asarray(first_rounds(layout.microbatches, layout.pp))

    def counted(index: int) -> tuple[list[str], np.ndarray]:
        pipeline = (layout.pp, layout.stages_per_rank, few, np.broadcast_to(rank, own.shape))
        return moments(*(int(number[index]) for number in pipeline), layers[which[index]])

    key = which * (few.max() + 1) + few
    order, peak = np.argsort(key, kind="stable"), np.sum(list(always.values()), axis=0)
    for rows in np.split(order, np.flatnonzero(np.diff(key[order])) + 1):
        peak[rows] += (counted(rows[0])[1] @ sizes[:, rows]).max(axis=0)

    def at(index: int) -> tuple[str, dict[str, float]]:
        names, counts = counted(index)
        fullest = int((counts @ sizes[:, index]).argmax())
        held = {kind: float(size[index]) for kind, size in always.items()}
        for size, count, kind in zip(sizes[:, index], counts[fullest], kinds, strict=True):
            held[_seen(kind, shards[index] == 1)] += float(size * count)
        return names[fullest], held

    return Held(peak, at)


def sizes_of(work: Work, layout: Layout) -> Sizes:
    """Bytes of each thing in COUNTED for each layout, and their kinds."""
    shards, experts = layout.dp * layout.cp, work.layer.experts
    units = work.layer.parameters + experts, work.lookup, work.ends.parameters
    own = work.layer.parameters / shards + experts / layout.expert_shards, work.lookup / shards, units[2] / shards
    alone, once = shards == 1, layout.passes == 1
    kept, waits, gradient = _backward(work, layout)
    sizes = {f"gathered {name}": 2 * size for name, size in zip(UNITS, units, strict=True)}
    sizes |= {f"gradient {name}": 4 * size for name, size in zip(UNITS, units, strict=True)}
    sizes |= {f"scattered {name}": 4 * size * once for name, size in zip(UNITS, own, strict=True)}
    sizes |= {f"new {name}": 4 * size * ~alone for name, size in zip(UNITS, own, strict=True)}
    summed = ~once & (layout.replicas > 1)  # over the replicas; torch keeps it until the stage's exchange ends
    sizes |= {f"summed {name}": 4 * size * summed for name, size in zip(UNITS, own, strict=True)}
    sizes |= {"of layer": gradient, "cast": 2 * work.layer.working["none"][1][1]}
    sizes |= {"waits": kept, "backward": waits, "message": work.sent, "entering": work.entering}
    sizes |= {"loss": work.ends.kept["none"], "logits": work.ends.kept["output"]}
    sizes |= {"of output": 2 * work.ends.parameters, "of table": 2 * work.lookup}
    kinds = ["parameters"] * 3 + ["gradients"] * 14 + ["activations"] * 8
    found = np.empty((len(COUNTED), *shards.shape))
    for row, name in zip(found, COUNTED, strict=True):
        row[:] = sizes[name]
    return found, kinds


def _backward(work: Work, layout: Layout) -> tuple[Number, Number, Number]:
    """Bytes of a layer that wait; what its backward adds at its fullest moment, and the gradients among that."""
    all_kept = work.layer.kept["none"] - (work.layer.kept.get("fused", 0) if layout.compiled else 0)
    kept = all_kept if layout.recompute == "none" else work.layer.kept[layout.recompute]
    waits, gradient = np.asarray(-np.inf), np.asarray(0)
    for size, parameters in work.layer.working["none" if layout.recompute == "none" else "again"]:
        more = size + 2 * parameters > waits + gradient
        waits, gradient = np.where(more, size, waits), np.where(more, 2 * parameters, gradient)
    return kept, all_kept - kept + waits, gradient


def _seen(kind: str, is_cast: bool) -> str:
    """What FSDP casts on a rank that shares no weights, which the dry run counts among the activations."""
    return "activations" if kind == "parameters" and is_cast else kind


def _kinds(parameters: Number, gradients: Number, optimizer: Number, activations: Number) -> dict[str, Number]:
    return {"parameters": parameters, "gradients": gradients, "optimizer": optimizer, "activations": activations}
