"""Rows travel to the ranks that have their experts, and back; on gloo and NCCL alike."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed._functional_collectives import all_to_all_single, wait_tensor

from torchtitan.models.mixture import Experts


class Exchange:
    """All-to-all over ranks of which each has as many experts, in order.

    How many rows travel is known only on the device: the host waits for these numbers once a layer and pass.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group

    @torch.compiler.disable
    def __call__(self, experts: Experts, rows: Tensor, ends: Tensor) -> Tensor:
        own = ends.diff(prepend=ends.new_zeros(1))  # rows for each expert, [E]
        theirs = _all_to_all(own, self.group)  # rows from each rank for each expert here, [ranks * experts here]
        send, receive = self.sizes(own, theirs, len(rows))
        rows = _AllToAll.apply(rows, self.group, send, receive)  # sorted by rank, then by expert
        by_rank = theirs.unflatten(0, (self.group.size(), -1))
        place = _places(by_rank, len(rows))
        rows = _Permute.apply(rows, place)
        rows = experts(rows, by_rank.sum(0).cumsum(0).int())
        rows = _Permute.apply(rows, _inverse(place))
        return _AllToAll.apply(rows, self.group, receive, send)

    def sizes(self, own: Tensor, theirs: Tensor, num_rows: int) -> tuple[list[int], list[int]]:
        """How many of this rank's rows go to each rank, and how many come from it."""
        both = torch.stack([own, theirs]).unflatten(1, (self.group.size(), -1)).sum(2)
        send, receive = both.tolist()
        return send, receive


def _places(by_rank: Tensor, num_rows: int) -> Tensor:
    """The rows of [ranks, experts] in the order of experts."""
    experts = torch.arange(by_rank.shape[1], device=by_rank.device).repeat(len(by_rank))
    return experts.repeat_interleave(by_rank.flatten(), output_size=num_rows).sort(stable=True).indices


def _inverse(order: Tensor) -> Tensor:
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device)
    return place


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor) -> Tensor:
        ctx.save_for_backward(order)
        return rows[order]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient[_inverse(ctx.saved_tensors[0])], None


class _AllToAll(torch.autograd.Function):
    """Backward sends each gradient to where the row came from. Gradients are sums over ranks, never means."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: ProcessGroup, send: list[int], receive: list[int]) -> Tensor:
        ctx.group, ctx.send, ctx.receive = group, send, receive
        return _all_to_all(rows, group, send, receive)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return _all_to_all(gradient, ctx.group, ctx.receive, ctx.send), None, None, None


def _all_to_all(
    rows: Tensor, group: ProcessGroup, send: list[int] | None = None, receive: list[int] | None = None
) -> Tensor:
    """Without sizes, as many to each. A function of its input, which a recompute can keep (parallel/recompute.py)."""
    return wait_tensor(all_to_all_single(rows.contiguous(), receive, send, group))


class EveryRank:
    """For generation, where all ranks have all tokens: each computes the rows of its experts, and the sum has all."""

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group

    def __call__(self, experts: Experts, rows: Tensor, ends: Tensor) -> Tensor:
        here, rank = len(ends) // self.group.size(), self.group.rank()
        stops = [0, *ends.tolist()]
        begin, end = stops[rank * here], stops[(rank + 1) * here]
        out = torch.zeros_like(rows)
        own = ends[rank * here : (rank + 1) * here] - begin
        out[begin:end] = experts(rows[begin:end], own)
        dist.all_reduce(out, group=self.group)
        return out
