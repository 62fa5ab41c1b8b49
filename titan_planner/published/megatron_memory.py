"""Bytes that a rank of Megatron-LM holds: weights in 16 bits, gradients in 32, AdamW's three tensors in 32."""

import numpy as np

from titan_planner.plan.cost import Layout
from torchtitan.models.operations import Number, Work

_KINDS = ("parameters", "gradients", "optimizer", "activations")


def held(work: Work, layout: Layout) -> dict[str, float]:
    """The first or the last rank of a pipeline. Of interleaved stages, Megatron begins with twice as many."""
    pp, layers = layout.pp, work.num_layers / layout.pp
    kept = work.layer.kept.get(layout.recompute, work.layer.kept["none"])
    shares = layout.dp * layout.cp if layout.splits_optimizer else 1
    first, last = waiting_layers(work, layout, 0), waiting_layers(work, layout, pp - 1)
    again = work.layer.kept["none"] - kept

    def at(parameters: Number, activations: Number) -> dict[str, float]:
        sizes = 2 * parameters, 4 * parameters, 12 * parameters / shares, activations
        return {kind: float(size) for kind, size in zip(_KINDS, sizes, strict=True)}

    of_layers = layers * work.layer.parameters
    whole = work.lookup if pp == 1 else 0  # an only rank has both tables
    at_loss = at(of_layers + work.ends.parameters + whole, last * kept + work.ends.kept["none"])
    in_backward = at(of_layers + work.lookup + whole, first * kept + again)
    return max(at_loss, in_backward, key=lambda kinds: sum(kinds.values()))


def waiting_layers(work: Work, layout: Layout, rank: Number) -> Number:
    """Layers that wait for their backward, each counted once for every microbatch."""
    pp, stages = layout.pp, layout.stages_per_rank
    ahead = (pp - 1 - rank) * np.where(stages > 1, 2, 1) + (stages - 1) * pp + 1
    return np.minimum(ahead, layout.microbatches * stages) * work.num_layers / (pp * stages)
