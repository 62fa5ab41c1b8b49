"""Ends a run whose loss or gradient norm is not finite, and names the ranks and the documents or samples to blame."""

import math
from collections.abc import Mapping
from typing import Any, NoReturn

import torch.distributed as dist

from torchtitan.observe.health import NotFiniteError

MOST_RANKS_SHOWN = 4


def stop(
    step: int,
    reason: str,
    left_out: bool,
    on_nonfinite: str,
    mine: tuple[float, str],
    group: dist.ProcessGroup,
    unit: str,
) -> NoReturn:
    """Raise with what every rank says of itself: its loss and what it read. All ranks judge alike, so all get here."""
    everyone: list[Any] = [None] * group.size()
    dist.all_gather_object(everyone, (dist.get_rank(), *mine), group=group)
    losses, origins = ({rank: each[i] for rank, *each in everyone} for i in (0, 1))
    could_skip = left_out and on_nonfinite != "skip"
    raise NotFiniteError(describe_stop(step, reason, left_out, could_skip, losses, origins, unit))


def describe_stop(
    step: int,
    reason: str,
    update_left_out: bool,
    could_skip: bool,
    own_losses: Mapping[int, float],
    batches: Mapping[int, str],
    unit: str = "tokens",
) -> str:
    """The message that ends a run: the step, the ranks whose own loss is not finite, and what they read."""
    blamed = [rank for rank, loss in own_losses.items() if not math.isfinite(loss)]
    skip = ', or set training.on_nonfinite = "skip"' if could_skip else ""
    where = f"on rank {', '.join(map(str, blamed))}" if blamed else "every rank's own loss is finite"
    lines = [
        f"step {step}: {reason} ({where}).",
        "This step's update was left out." if update_left_out else "This step's update was applied.",
        f"Inspect the {'documents' if unit == 'tokens' else unit} below, or lower optimizer.lr{skip}.",
    ]
    shown = (blamed or list(batches))[:MOST_RANKS_SHOWN]
    lines += [f"rank {rank} read:\n{batches[rank]}" for rank in shown]
    return "\n".join(lines)
