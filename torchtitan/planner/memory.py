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
    every, stays = work.num_parameters, (shards == 1) | (layout.regathers == 0)
    alone = shards == 1  # nothing is gathered or scattered: weights are cast once, gradients are in place
    own = 4 * every / shards
    kept, more, working = _activations(work, layout)
    earlier = np.where(layout.microbatches > 1, own, 0)  # gradients of the local batches before
    reads = np.where(alone, 0.0, 4.0)  # bytes a parameter that a scatter reads
    return Held(
        {
            "the loss": _kinds(
                own + np.where(stays, 2 * every, 2 * (out + layer)),
                earlier + 2 * out,
                2 * own,
                work.num_layers * kept + work.ends.kept["none"],
            ),
            "the last layer's backward": _kinds(
                own + np.where(stays, 2 * every, 4 * layer),
                np.maximum(earlier, 4 * out / shards) + reads * out + 0.5 * layer,
                2 * own,
                work.num_layers * kept + more + working,
            ),
            "the first layer's backward": _kinds(
                own + np.where(stays, 2 * every, 2 * layer),
                own + reads * layer + 2 * layer,
                2 * own,
                kept + more + working,
            ),
            "the table's backward": _kinds(
                own + np.where(stays, 2 * every, 0),
                own + (reads + 2) * work.lookup + reads * layer,
                2 * own,
                working,
            ),
        }
    )


def staged(work: Work, layout: Layout, layers: Number, live: Number, first: Any, last: Any) -> Held:
    """A rank of a pipeline, with `layers` in all; `live` pairs of one of its stages and a microbatch wait at most."""
    shards = layout.dp * layout.cp
    every = layers * work.layer.parameters + first * work.lookup + last * work.ends.parameters
    own, stages = 4 * every / shards, layout.stages_per_rank
    kept, more, working = _activations(work, layout)
    waiting = live * layers / stages * kept
    # torch's stages allocate a buffer for each message of a pass that they receive.
    buffers = work.sent * layout.microbatches * (2 * stages - first - last)
    weights, gradients = own + 2 * every, np.where(layout.passes > 1, own, 0) + 4 * every
    return Held(
        {
            "a layer's backward": _kinds(weights, gradients, 2 * own, waiting + more + working + buffers),
            "the loss": _kinds(weights, gradients, 2 * own, waiting + buffers + last * work.ends.kept["none"]),
            "the exchange of gradients": _kinds(weights, 4 * every + own, 2 * own, buffers),
        }
    )


def _activations(work: Work, layout: Layout) -> tuple[Number, Number, Number]:
    """Bytes of a layer that wait for backward; what its recompute adds while it runs; what backward works with."""
    kept = work.layer.kept[layout.recompute]
    return kept, work.layer.kept["none"] - kept, work.layer.working


def _kinds(parameters: Number, gradients: Number, optimizer: Number, activations: Number) -> dict[str, Number]:
    return {"parameters": parameters, "gradients": gradients, "optimizer": optimizer, "activations": activations}
