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


def whole(work: Work, layout: Layout) -> Held:
    """A rank with the whole model, which takes one local batch after another."""
    shards, layer, out = layout.dp * layout.cp, work.layer.parameters, work.ends.parameters
    experts, of_experts = work.layer.experts, work.num_layers * work.layer.experts
    own, more_shards = 4 * work.num_parameters / shards + 4 * of_experts / layout.expert_shards, 4 * out / shards
    states = layout.states / 4 * own
    # Weights that stay gathered, or cast: of all units that backward has not reached.
    stays_too = (layout.expert_shards == 1) | (layout.regathers == 0)
    one = np.where(stays_too, 2 * of_experts, 2 * experts)  # experts that are gathered in the last layer
    stays, table = (shards == 1) | (layout.regathers == 0), np.where(layout.regathers == 0, 2 * work.lookup, 0)
    every = 2 * (work.num_parameters - work.lookup) + table  # backward of a lookup needs no weights
    kept, working, of_layer = _backward(work, layout)
    waiting = work.num_layers * kept
    earlier = np.where(layout.microbatches > 1, own, 0)  # gradients of the local batches before
    reads = np.where(shards > 1, 4.0, 0.0)  # bytes a parameter that a scatter reads; one rank has nothing to scatter
    many, replicated = layout.microbatches > 1, layout.replicas > 1
    scattered = np.where(many, own, more_shards)
    adds, sums = np.where(many, more_shards, 0), np.where(many & replicated, more_shards, 0)
    summed = np.where(many & replicated, own, 0)  # over the replicas; torch keeps it until backward ends
    of_layers = own + np.where(stays, every - 2 * out, 4 * layer) + one
    before = (
        own - 4 * (layer + work.lookup) / shards - 4 * experts / layout.expert_shards
    )  # of all units that the first layer's backward follows
    almost = np.where(many, own, before) + np.where(many & replicated, before, 0)
    return _fullest(
        {
            "the loss": _kinds(
                own + np.where(stays, every, 2 * (out + layer)) + one,
                earlier + 2 * out,
                states,
                waiting + work.ends.kept["none"],
            ),
            "the exchange of the output layer": _kinds(
                own + np.where(stays, every - 2 * out, 2 * layer) + one,
                scattered + adds + (2 + reads) * out,
                states,
                waiting + work.sent,
            ),
            "the last layer's backward": _kinds(
                of_layers, scattered + sums + reads * out + of_layer, states, waiting + working
            ),
            "the first layer's backward": _kinds(
                own + table + 2 * layer + 2 * experts, almost + (reads + 2) * layer, states, kept + working
            ),
            "the table's backward": _kinds(own + table, own + summed + (reads + 2) * work.lookup, states, 0.0),
        },
        own,
        (shards == 1) & (layout.tp * layout.replicas > 1),
    )


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
