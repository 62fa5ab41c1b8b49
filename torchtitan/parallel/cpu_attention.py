"""Causal attention on a CPU by matrix products: a piece of the queries at a time, over the keys they may see.

Compiled and on short sequences it takes a third to a half of torch's kernel's time (docs/recipe/figures.md). As in
FlashAttention (arXiv:2205.14135), backward computes the probabilities again, so memory grows linearly with the length.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

_MIN_ROWS, _MAX_PIECES = 128, 8
_MAX_SEQ_LEN = 4096  # torch's kernel is faster on longer sequences


class AttentionByProducts(nn.Module):
    """Replaces the attention module that calls torch's kernel. Sequences over _MAX_SEQ_LEN still go to that module."""

    def __init__(self, torch_kernel: nn.Module) -> None:
        super().__init__()
        self.torch_kernel = torch_kernel

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: None) -> Tensor:
        if q.shape[1] > _MAX_SEQ_LEN:
            return self.torch_kernel(q, k, v, mask)
        return causal_attention(q, k, v)


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of queries [B, S, H, D] to keys and values [B, S, KV heads, D]."""
    batch, kv_heads = k.shape[0], k.shape[2]
    q = q.unflatten(2, (kv_heads, -1)).permute(0, 2, 3, 1, 4).flatten(0, 1)  # [N, G, S, D]: G query heads a key head
    k, v = k.transpose(1, 2).flatten(0, 1), v.transpose(1, 2).flatten(0, 1)  # [N, S, D]
    out: Tensor = _CausalAttention.apply(q, k, v)
    return out.unflatten(0, (batch, kv_heads)).permute(0, 3, 1, 2, 4).flatten(2, 3)


class _CausalAttention(torch.autograd.Function):
    """Causal attention of queries [N, G, S, D] to keys and values [N, S, D]."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, log_sums = [], []
        for rows, seen in _pieces(q.shape[2]):
            products = torch.bmm(_flat(q, rows), k[:, seen].transpose(1, 2)).unflatten(1, (q.shape[1], -1))
            hidden = _hidden(rows, seen, k)[:, None]
            scores = _scores(products, hidden, q.shape[-1])  # [N, G, rows, keys]
            largest = scores.amax(-1, keepdim=True)
            exponentials = (scores - largest).exp()
            total = exponentials.sum(-1, keepdim=True)
            log_sums.append((largest + total.log()).squeeze(-1))
            # Divide after the product: its result has D values a query, the exponentials have one for each key.
            values = torch.bmm(exponentials.to(v.dtype).flatten(1, 2), v[:, seen]).unflatten(1, (q.shape[1], -1))
            out.append((values / total).to(v.dtype))
        whole = torch.cat(out, dim=2)
        ctx.save_for_backward(q, k, v, whole, torch.cat(log_sums, dim=2))
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, out, log_sums = ctx.saved_tensors
        row_sums = (gradient.float() * out.float()).sum(-1)
        grad_q: list[Tensor] = []
        grad_k: list[Tensor] = []  # grad_k and grad_v are in float32, one tensor for each piece of the keys
        grad_v: list[Tensor] = []
        for rows, seen in _pieces(q.shape[2]):
            # Multiply keys by queries, not queries by keys. Two of the three products that follow then need no
            # transpose, and the compiler computes the scores again. In forward's order it would keep forward's scores.
            queries, grad_out, keys = _flat(q, rows), _flat(gradient, rows), k[:, seen]
            products = torch.bmm(keys, queries.transpose(1, 2)).unflatten(2, (q.shape[1], -1))
            hidden = _hidden(rows, seen, k).transpose(1, 2)[:, :, None]
            scores = _scores(products, hidden, q.shape[-1])  # [N, keys, G, rows]
            probabilities = (scores - log_sums[:, None, :, rows]).exp()
            _add_by_piece(grad_v, torch.bmm(probabilities.to(v.dtype).flatten(2), grad_out))
            products = torch.bmm(v[:, seen], grad_out.transpose(1, 2)).unflatten(2, (q.shape[1], -1))
            grad_scores = probabilities * (products.float() - row_sums[:, None, :, rows])
            grad_scores = (grad_scores * q.shape[-1] ** -0.5).to(q.dtype).flatten(2)
            grad_q.append(torch.bmm(grad_scores.transpose(1, 2), keys).unflatten(1, (q.shape[1], -1)))
            _add_by_piece(grad_k, torch.bmm(grad_scores, queries))
        of_keys, of_values = torch.cat(grad_k, dim=1).to(k.dtype), torch.cat(grad_v, dim=1).to(v.dtype)
        return torch.cat(grad_q, dim=2), of_keys, of_values


def _pieces(seq_len: int) -> Iterator[tuple[slice, slice]]:
    """Yield each piece of the queries, with the keys up to its last query."""
    size = max(_MIN_ROWS, -(-seq_len // _MAX_PIECES))
    for begin in range(0, seq_len, size):
        end = min(begin + size, seq_len)
        yield slice(begin, end), slice(0, end)


def _flat(x: Tensor, rows: slice) -> Tensor:
    """Return [N, G * rows, D], so that one product serves all G query heads, which share keys and values."""
    return x[:, :, rows].flatten(1, 2)


def _hidden(rows: slice, seen: slice, k: Tensor) -> Tensor:
    """[1, rows, keys]: True where a query may not see a key, because the key comes after it."""
    return torch.ones(1, rows.stop - rows.start, seen.stop, dtype=torch.bool, device=k.device).triu(rows.start + 1)


def _scores(products: Tensor, hidden: Tensor, head_dim: int) -> Tensor:
    """Scale the products in float32, and write minus infinity where a query may not see a key."""
    return (products.float() * head_dim**-0.5).masked_fill(hidden, float("-inf"))


def _add_by_piece(totals: list[Tensor], x: Tensor) -> None:
    """Add a gradient to the totals, which hold one tensor for each piece of the keys so far; append the rest."""
    sizes = [piece.shape[1] for piece in totals]
    *seen, new = x.float().split([*sizes, x.shape[1] - sum(sizes)], dim=1)
    totals[:] = [*map(torch.add, totals, seen), new]
