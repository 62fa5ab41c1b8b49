"""The batches on which a user's loss is tried, and what the run says of a loss that depends on the division."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchtitan.models.spec import ModelSpec
from torchtitan.observe.log import logger
from torchtitan.own_model.record import map_leaves
from torchtitan.own_model.rows import Dims, cut, sample_dims
from torchtitan.own_model.samples import collate_of, own_draws
from torchtitan.refusal import Refusal

ABOUT = "it gets the model's output and the sample's target, as batches"


class Trials(NamedTuple):
    """Batches to try a function on, in this order: a sample, the same twice, all samples, and these in parts."""

    batches: list[tuple[Any, Any]]
    counts: list[int]
    dims: Dims | None  # by which the parts are cut out of one batch, so that they have its padding
    drawn: list[int]  # the batches on which the model drew random numbers


def make_trials(spec: ModelSpec, samples: Sequence[Any]) -> Trials:
    """Parts of one, two and the rest, cut out of one batch. Where nothing tells how to cut, each is collated alone."""
    collate, count = collate_of(spec), len(samples)
    first, twice, whole = collate(samples[:1]), collate([samples[0]] * 2), collate(samples)
    sizes = [size for size in (min(1, count), min(2, count - 1), count - 3) if size > 0]
    dims: Dims | None = None
    try:
        dims = sample_dims("batches", [first, twice, whole], [1, 2, count])
        parts = parts_of(whole, dims, sizes)
    except Refusal:
        parts = [collate(samples[end - size : end]) for size, end in zip(sizes, accumulate(sizes), strict=True)]
    return Trials([first, twice, whole, *parts], [1, 2, count, *sizes], dims, [])


def parts_of(whole: Any, dims: Dims, sizes: Sequence[int]) -> list[Any]:
    return [cut(whole, dims, end - size, size) for size, end in zip(sizes, accumulate(sizes), strict=True)]


def fresh(tree: Any) -> Any:
    """Forward may write into its inputs."""
    return map_leaves(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, tree)


@torch.no_grad()
def move_weights(model: nn.Module) -> None:
    """A head that begins with zeros would give every sample the same loss, and hide how they are weighted."""
    with own_draws("weights to try a loss with"):
        for p in model.parameters():
            if p.is_floating_point() and p.requires_grad:
                p.add_(torch.randn_like(p), alpha=0.2 / p[0].numel() ** 0.5 if p.dim() > 1 and p.numel() else 0.05)


def say(spec: ModelSpec, said: str, pieces: int) -> None:
    if pieces == 1:
        logger.info(
            f"{said}; a layout that divides a batch would give other numbers, and is refused, and a validation of "
            "several batches averages theirs by their samples"
        )
    elif spec.local_loss:
        logger.info(f"{said}, and each of the {pieces} pieces of a batch is compared alone (local_loss = True)")
    else:
        raise Refusal(
            f"{said}, and this layout divides a batch into {pieces} pieces, so it would train another model than one "
            "process does. If it leaves out or weights elements, return a pair, a sum and how many it is over, as "
            'cross_entropy(output, target, reduction="sum"), (target != -100).sum() does, or with weights '
            "weight[target].sum(). If it compares the samples of a batch, as a contrastive loss does, use a layout "
            "that does not divide a batch, or set local_loss = True in the ModelSpec to compare within each piece"
        )
