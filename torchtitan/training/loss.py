"""The training loss: a sum over tokens, which the step divides once by the valid tokens of the whole global batch.

The logits are never all in float32 at once, and backward overwrites them with their gradient.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from torchtitan.config.schema import Compile
from torchtitan.models.spec import IGNORED

LossFunction = Callable[[Tensor, Tensor], Tensor]


def build_loss(compile_: Compile) -> LossFunction:
    """Return the loss function, compiled if the configuration asks for it."""
    if not (compile_.enable and "loss" in compile_.components):
        return cross_entropy_sum
    compiled = partial(torch.compile, backend=compile_.backend, fullgraph=True)
    read_rows, write_exponentials = map(compiled, (_read_rows, _write_exponentials))
    return partial(cross_entropy_sum, kernels=_Kernels(read_rows, write_exponentials, most_chunks=None))


def cross_entropy_sum(logits: Tensor, labels: Tensor, kernels: "_Kernels | None" = None) -> Tensor:
    return cross_entropy(logits, labels, kernels).sum()


def cross_entropy(logits: Tensor, labels: Tensor, kernels: "_Kernels | None" = None) -> Tensor:
    """The cross-entropy [B * S, 1] of logits [B, S, V] and labels [B, S]. Ranks may split the logits by vocabulary."""
    group, first = None, 0
    if isinstance(logits, DTensor):
        if logits.placements[0].is_shard():
            group, first = logits.device_mesh.get_group(), logits.__create_chunk_list__()[0].offsets[-1]
        logits = logits.to_local()
    losses: Tensor = _CrossEntropy.apply(
        logits.flatten(0, 1), labels.flatten()[:, None], group, first, kernels or _Kernels()
    )
    return losses


class _CrossEntropy(torch.autograd.Function):
    """Cross-entropy of labels [N, 1] and logits [N, V], whose first column is token `first` of the vocabulary."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, group: dist.ProcessGroup | None, first: int, kernels: "_Kernels"
    ) -> Tensor:
        place, is_here = _places(labels, first, logits.shape[1])
        parts = [kernels.read_rows(*chunk) for chunk in kernels.chunks(logits, place)]
        largest, of_labels, sums = (torch.cat(part) for part in zip(*parts, strict=True))
        if group is not None:
            own = largest.clone()
            dist.all_reduce(largest, dist.ReduceOp.MAX, group)
            less = own - largest
            both = torch.stack([(of_labels + less) * is_here, sums * less.exp()])
            dist.all_reduce(both, group=group)
            of_labels, sums = both
        ctx.save_for_backward(logits, labels, largest, sums)
        ctx.first, ctx.kernels = first, kernels
        return (sums.log() - of_labels) * (labels != IGNORED)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        logits, labels, largest, sums = ctx.saved_tensors
        place, is_here = _places(labels, ctx.first, logits.shape[1])
        scale = (labels != IGNORED) * gradient
        factor = scale / sums
        # The gradient is the probabilities, less one at this rank's labels. The labels are written by themselves below:
        # a compiler would copy all logits to scatter into them.
        of_label = (logits.gather(1, place).float() - largest).exp() * factor - is_here.float() * scale
        for chunk in ctx.kernels.chunks(logits, largest, factor):
            ctx.kernels.write_exponentials(*chunk)
        # Indexing, because scatter_ takes 88 ms for 2048 labels on a CPU.
        logits[torch.arange(len(logits), device=logits.device), place[:, 0]] = of_label[:, 0].to(logits.dtype)
        return logits, None, None, None, None


def _places(labels: Tensor, first: int, size: int) -> tuple[Tensor, Tensor]:
    """Return each label's column in this rank's logits, and whether the label lies on this rank."""
    place = labels - first
    return place.clamp(0, size - 1), (labels != IGNORED) & (place >= 0) & (place < size)


def _read_rows(rows: Tensor, place: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return each row's largest value, and with it subtracted the value at the row's place and the exponentials' sum.

    So written, torch's compiler reads the rows once on a GPU.
    """
    x = rows.float()
    largest = x.amax(1, keepdim=True)
    x = x - largest
    return largest, x.gather(1, place), x.exp_().sum(1, keepdim=True)


def _write_exponentials(rows: Tensor, largest: Tensor, factor: Tensor) -> None:
    rows.copy_((rows.float() - largest).exp_().mul_(factor))


@dataclass(frozen=True)
class _Kernels:
    """The loss's two passes. Uncompiled they take a few rows at a time; compiled, each takes all rows at once."""

    read_rows: Callable[..., Any] = _read_rows
    write_exponentials: Callable[..., Any] = _write_exponentials
    least_elements: int = 1 << 20  # smallest chunk, in float32 elements: what a CPU's caches hold
    most_chunks: int | None = 32  # chunks grow where there would be more than this; None: one chunk

    def chunks(self, logits: Tensor, *others: Tensor) -> Iterator[tuple[Tensor, ...]]:
        size = len(logits)
        if self.most_chunks is not None:
            size = max(1, max(self.least_elements, logits.numel() // self.most_chunks) // logits.shape[1])
        return zip(*(tensor.split(size) for tensor in (logits, *others)), strict=True)
