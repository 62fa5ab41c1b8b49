"""Bytes that a rank of a layout holds at its peak, in closed form; a number may be an array.

The peak is one of a few moments of a step. Each is a sum of what is held throughout, weights that FSDP has gathered,
gradients and activations, so the dry run's kinds of bytes are the same. `tests/unit/test_plan_memory.py` compares both.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from torchtitan.models.operations import Number, Work
from torchtitan.planner.cost import Layout


@dataclass(frozen=True)
class Held:
    """Bytes at each moment, by kind; the moment with most is the peak."""

    moments: dict[str, dict[str, Any]]

    @property
    def peak(self) -> Number:
        return np.max([sum(kinds.values()) for kinds in self.moments.values()], axis=0)

    def at(self, index: int) -> tuple[str, dict[str, float]]:
        """The name of the fullest moment of one layout, and its bytes by kind."""
        one = {
            name: {kind: float(np.broadcast_to(size, np.shape(self.peak))[index]) for kind, size in kinds.items()}
            for name, kinds in self.moments.items()
        }
        name = max(one, key=lambda name: sum(one[name].values()))
        return name, one[name]


def whole(work: Work, layout: Layout) -> Held:
    """A rank with the whole model, which takes one local batch after another."""
    shards, layer, out = layout.dp * layout.cp, work.layer.parameters, work.ends.parameters
    own, more_shards = 4 * work.num_parameters / shards, 4 * out / shards
    # Weights that stay gathered, or cast: of all units that backward has not reached.
    every, stays = 2 * work.num_parameters, (shards == 1) | (layout.regathers == 0)
    table = np.where(stays, 2 * work.lookup, 0)
    kept, more, working = _activations(work, layout)
    waiting = work.num_layers * kept
    earlier = np.where(layout.microbatches > 1, own, 0)  # gradients of the local batches before
    reads = np.where(shards > 1, 4.0, 0.0)  # bytes a parameter that a scatter reads; one rank has nothing to scatter
    scattered = np.maximum(earlier, more_shards) + np.where(layout.replicas > 1, more_shards, 0)
    of_layers = own + np.where(stays, every - 2 * out, 4 * layer)
    almost = own - np.where(layout.microbatches > 1, 0, 4 * (layer + work.lookup) / shards)
    return Held(
        {
            "the loss": _kinds(
                own + np.where(stays, every, 2 * (out + layer)),
                earlier + 2 * out,
                2 * own,
                waiting + work.ends.kept["none"],
            ),
            "the exchange of the output layer": _kinds(
                own + np.where(stays, every - 2 * out, 2 * layer),
                scattered + (2 + reads) * out,
                2 * own,
                waiting + work.sent,
            ),
            "the last layer's feed-forward": _kinds(
                of_layers, scattered + reads * out + 0.5 * layer, 2 * own, waiting + more + working
            ),
            "the last layer's attention": _kinds(
                of_layers, scattered + reads * out + 2 * layer, 2 * own, waiting + 0.5 * work.layer.kept["none"]
            ),
            "the first layer's backward": _kinds(
                own + table + 2 * layer, almost + (reads + 2) * layer, 2 * own, kept + more + working
            ),
            "the table's backward": _kinds(own + table, own + (reads + 2) * work.lookup, 2 * own, 0.0),
        }
    )


def staged(work: Work, layout: Layout, layers: Number, waiting: Number, first: Any, last: Any) -> Held:
    """A rank of a pipeline. `waiting`: layers, each counted once for every microbatch that waits for its backward."""
    shards, layer, stages = layout.dp * layout.cp, work.layer.parameters, layout.stages_per_rank
    every = layers * layer + first * work.lookup + last * work.ends.parameters
    largest = np.maximum(layer, np.maximum(first * work.lookup, last * work.ends.parameters))
    own = 4 * every / shards
    kept, more, working = _activations(work, layout)
    # torch's stages allocate a buffer for each message of a pass that they receive.
    buffers = work.sent * layout.microbatches * (2 * stages - first - last)
    outputs = first * work.sent * layout.microbatches * stages
    weights, earlier = own + 2 * every, np.where(layout.passes > 1, own, 0)
    gradients = earlier + 4 * every
    # With fewer than two rounds of an interleaved schedule, most waits before any but the last stage has gradients.
    is_short = (stages > 1) & (layout.microbatches < 2 * layout.pp)
    is_all = waiting >= layers * layout.microbatches  # no backward before the last forward
    begun = gradients - np.where(is_short, 4 * ((stages - 1) / stages * layers * layer + first * work.lookup), 0)
    logits = last * (work.ends.kept["none"] + work.ends.kept["output"])  # torch holds the last output until the next
    held = waiting * kept + buffers
    ending = np.where(is_short, layout.microbatches * layers / stages, waiting) * kept + buffers
    return Held(
        {
            "the first backward": _kinds(
                weights, np.where(is_all, earlier, begun), 2 * own, held + more + working + outputs
            ),
            "a layer's backward": _kinds(
                weights, begun, 2 * own, held - np.where(is_all, layers * kept, 0) + more + working + outputs
            ),
            "the loss": _kinds(weights, begun, 2 * own, held + logits),
            "the output layer's backward": _kinds(
                weights, begun, 2 * own, held + last * (work.ends.kept["none"] + 2 * work.ends.parameters)
            ),
            "the table's backward": _kinds(
                weights, gradients, 2 * own, ending - layers / stages * kept + first * 2 * work.lookup
            ),
            "the exchange of gradients": _kinds(
                own + 2 * layer, gradients + np.where(shards > 1, 4 * (1 + 1 / shards) * largest, 0), 2 * own, buffers
            ),
        }
    )


def _activations(work: Work, layout: Layout) -> tuple[Number, Number, Number]:
    """Bytes of a layer that wait for backward; what its recompute adds while it runs; what backward works with."""
    kept = work.layer.kept[layout.recompute]
    return kept, work.layer.kept["none"] - kept, work.layer.working


def _kinds(parameters: Number, gradients: Number, optimizer: Number, activations: Number) -> dict[str, Number]:
    return {"parameters": parameters, "gradients": gradients, "optimizer": optimizer, "activations": activations}
