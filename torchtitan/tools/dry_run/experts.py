"""Experts in the dry run. Its tokens have no values, so no router decides: the experts of every rank get as many."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from torchtitan.experts import exchange as exchanges
from torchtitan.experts.exchange import Exchange
from torchtitan.models import mixture
from torchtitan.models.mixture import Experts
from torchtitan.tools.dry_run.footprint import Footprint


@contextmanager
def even_load(footprint: Footprint) -> Iterator[None]:
    """Inside, as many rows travel to each rank. The footprint notes what grows with the load of a rank's experts."""

    def call(exchange: Exchange, experts: Experts, rows: Tensor, ends: Tensor) -> Tensor:
        footprint.is_routed = True
        out = exchange_plainly(exchange, experts, rows, ends)
        footprint.is_routed = False
        if out.requires_grad and rows.requires_grad:  # backward comes in at the end, and leaves at the beginning
            out.register_hook(lambda _: setattr(footprint, "is_routed", True))
            rows.register_hook(lambda _: setattr(footprint, "is_routed", False))
        return out

    exchange_plainly, product = Exchange.__call__, mixture.grouped

    def multiply(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
        # torch describes its product of fake tensors in bfloat16 only; selective recompute knows it by its name.
        is_known = rows.dtype == torch.bfloat16 and hasattr(torch, "_grouped_mm")
        result: Tensor = product(rows, weights, ends) if is_known else _Product.apply(rows, weights)
        return result

    with (
        mock.patch.object(mixture, "grouped", multiply),
        mock.patch.object(Exchange, "sizes", even_sizes),
        mock.patch.object(Exchange, "__call__", call),
        # Without torch's tensors that wait for a collective: these keep what a run does not.
        mock.patch.object(exchanges, "all_to_all_single", all_to_all),
        mock.patch.object(exchanges, "wait_tensor", lambda rows: rows),
    ):
        yield


def even_sizes(exchange: Exchange, own: Tensor, theirs: Tensor, num_rows: int) -> tuple[list[int], list[int]]:
    ranks = exchange.group.size()
    even = [num_rows // ranks + (rank < num_rows % ranks) for rank in range(ranks)]
    return even, even


def all_to_all(rows: Tensor, receive: list[int] | None, send: list[int] | None, group: ProcessGroup) -> Tensor:
    even = [len(rows) // group.size()] * group.size()
    sizes = receive or even, send or even
    result: Tensor = torch.ops._c10d_functional.all_to_all_single(rows, *sizes, group.group_name)
    return result


class _Product(torch.autograd.Function):
    """The rows of each expert times its matrix, without values."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weights)
        return rows.new_empty(len(rows), weights.shape[1])

    @staticmethod
    def backward(ctx: Any, arriving: Tensor) -> tuple[Tensor, Tensor]:
        rows, weights = ctx.saved_tensors
        return torch.empty_like(rows), torch.empty_like(weights)
