"""The training loss: a sum over tokens, so that whoever knows the whole batch can divide it once."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from torchtitan.config.schema import Compile

IGNORED = -100  # label of a position that does not count

LossFunction = Callable[[Tensor, Tensor], Tensor]

# Logits in float32 at a time: what a CPU's caches hold, or more where that would make too many chunks.
_CHUNK_ELEMENTS, _MOST_CHUNKS = 1 << 20, 32


def cross_entropy_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """Summed cross-entropy of logits [B, S, V] and labels [B, S], in float32; the compiler makes one pass of it."""
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(0, 1), ignore_index=IGNORED, reduction="sum")


def chunked_cross_entropy_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """The same a few rows at a time, so that never all logits are in float32; backward overwrites them.

    They may be split over the vocabulary.
    """
    group, first = None, 0
    if isinstance(logits, DTensor):
        if logits.placements[0].is_shard():
            group, first = logits.device_mesh.get_group(), logits.__create_chunk_list__()[0].offsets[-1]
        logits = logits.to_local()
    total: Tensor = _ChunkedCrossEntropy.apply(logits.flatten(0, 1), labels.flatten()[:, None], group, first)
    return total


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Of logits [N, V], which begin with this column of the vocabulary, and labels [N, 1]."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, group: dist.ProcessGroup | None, first: int) -> Tensor:
        largest = logits.amax(1, keepdim=True).float()
        if group is not None:
            dist.all_reduce(largest, dist.ReduceOp.MAX, group)
        sums, of_labels = torch.empty_like(largest), torch.empty_like(largest)
        column, is_own = _columns(labels, first, logits.shape[1])
        for rows, top, place, of_label, total in _in_chunks(logits, largest, column, of_labels, sums):
            x = rows.float() - top
            of_label.copy_(x.gather(1, place))
            total.copy_(x.exp_().sum(1, keepdim=True))
        of_labels *= is_own
        if group is not None:
            both = torch.stack([sums, of_labels])
            dist.all_reduce(both, group=group)
            sums, of_labels = both
        ctx.save_for_backward(logits, labels, largest, sums)
        ctx.first = first
        return ((sums.log() - of_labels) * (labels != IGNORED)).sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        logits, labels, largest, sums = ctx.saved_tensors
        column, is_own = _columns(labels, ctx.first, logits.shape[1])
        one_less, scale = -is_own.float(), (labels != IGNORED) * gradient
        for rows, top, place, change, total, factor in _in_chunks(logits, largest, column, one_less, sums, scale):
            probabilities = rows.float().sub_(top).exp_().div_(total)
            rows.copy_(probabilities.scatter_add_(1, place, change).mul_(factor))
        return logits, None, None, None


def _in_chunks(logits: Tensor, *others: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """A few rows of each at a time."""
    size = max(1, max(_CHUNK_ELEMENTS, logits.numel() // _MOST_CHUNKS) // logits.shape[1])
    return zip(*(tensor.split(size) for tensor in (logits, *others)), strict=True)


def _columns(labels: Tensor, first: int, size: int) -> tuple[Tensor, Tensor]:
    """Where each label's logit is, and whether it is here."""
    column = labels - first
    return column.clamp(0, size - 1), (labels != IGNORED) & (column >= 0) & (column < size)


def build_loss(compile_: Compile) -> LossFunction:
    """The loss, compiled where the configuration asks for it."""
    if compile_.enable and "loss" in compile_.components:
        return torch.compile(cross_entropy_sum, backend=compile_.backend, fullgraph=True)
    return chunked_cross_entropy_sum
