"""Causal attention on a CPU: some queries at a time over the keys they may see, by matrix products.

Compiled and with short sequences it takes a third to a half of the time of torch's kernel (docs/performance.md). As
in FlashAttention (arXiv:2205.14135) backward computes the probabilities again: memory does not grow with the square.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

_LEAST_ROWS, _MOST_PIECES = 128, 8
_LONGEST = 4096  # beyond, torch's kernel is faster


class AttentionByProducts(nn.Module):
    """Replaces attention by torch's kernel, which still gets sequences longer than _LONGEST."""

    def __init__(self, by_kernel: nn.Module) -> None:
        super().__init__()
        self.by_kernel = by_kernel

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        if q.shape[1] > _LONGEST:
            return self.by_kernel(q, k, v, mask)
        return causal_attention(q, k, v, mask)


def causal_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Causal attention of queries [B, S, H, D] to keys and values [B, S, KV heads, D]; a mask must be causal itself."""
    batch, kv_heads = k.shape[0], k.shape[2]
    q = q.unflatten(2, (kv_heads, -1)).permute(0, 2, 3, 1, 4).flatten(0, 1)  # [N, G, S, D]: queries of each key's head
    k, v = k.transpose(1, 2).flatten(0, 1), v.transpose(1, 2).flatten(0, 1)  # [N, S, D]
    out: Tensor = _CausalAttention.apply(q, k, v, mask)
    return out.unflatten(0, (batch, kv_heads)).permute(0, 3, 1, 2, 4).flatten(2, 3)


class _CausalAttention(torch.autograd.Function):
    """Of queries [N, G, S, D] to keys and values [N, S, D], under a mask [B, 1, S, S] perhaps."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        out, sums = [], []
        for rows, seen in _pieces(q.shape[2]):
            products = torch.bmm(_flat(q, rows), k[:, seen].transpose(1, 2)).unflatten(1, (q.shape[1], -1))
            hidden = _hidden(mask, rows, seen, k)[:, None]
            scores = _scores(products, hidden, q.shape[-1])  # [N, G, rows, keys]
            largest = scores.amax(-1, keepdim=True)
            exponentials = (scores - largest).exp()
            total = exponentials.sum(-1, keepdim=True)
            sums.append((largest + total.log()).squeeze(-1))
            # Divided afterwards, when there is a value for each of D and not for each key
            values = torch.bmm(exponentials.to(v.dtype).flatten(1, 2), v[:, seen]).unflatten(1, (q.shape[1], -1))
            out.append((values / total).to(v.dtype))
        whole = torch.cat(out, dim=2)
        ctx.save_for_backward(q, k, v, mask, whole, torch.cat(sums, dim=2))
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, mask, out, sums = ctx.saved_tensors
        of_out = (gradient.float() * out.float()).sum(-1)
        of_q: list[Tensor] = []
        of_k: list[Tensor] = []  # these two in float32, a piece of the keys each
        of_v: list[Tensor] = []
        for rows, seen in _pieces(q.shape[2]):
            # Keys by queries, not queries by keys: two of the three products that follow need no transpose, and the
            # compiler recomputes these scores. Had they forward's form, it would keep forward's in memory.
            queries, arriving, keys = _flat(q, rows), _flat(gradient, rows), k[:, seen]
            products = torch.bmm(keys, queries.transpose(1, 2)).unflatten(2, (q.shape[1], -1))
            hidden = _hidden(mask, rows, seen, k).transpose(1, 2)[:, :, None]
            scores = _scores(products, hidden, q.shape[-1])  # [N, keys, G, rows]
            probabilities = (scores - sums[:, None, :, rows]).exp()
            _add(of_v, torch.bmm(probabilities.to(v.dtype).flatten(2), arriving))
            products = torch.bmm(v[:, seen], arriving.transpose(1, 2)).unflatten(2, (q.shape[1], -1))
            of_scores = probabilities * (products.float() - of_out[:, None, :, rows])
            of_scores = (of_scores * q.shape[-1] ** -0.5).to(q.dtype).flatten(2)
            of_q.append(torch.bmm(of_scores.transpose(1, 2), keys).unflatten(1, (q.shape[1], -1)))
            _add(of_k, torch.bmm(of_scores, queries))
        return torch.cat(of_q, dim=2), torch.cat(of_k, dim=1).to(k.dtype), torch.cat(of_v, dim=1).to(v.dtype), None


def _pieces(seq_len: int) -> Iterator[tuple[slice, slice]]:
    """Some queries, and the keys up to the last of them."""
    size = max(_LEAST_ROWS, -(-seq_len // _MOST_PIECES))
    for begin in range(0, seq_len, size):
        end = min(begin + size, seq_len)
        yield slice(begin, end), slice(0, end)


def _flat(x: Tensor, rows: slice) -> Tensor:
    """[N, G * rows, D]: one product for all G, which share keys and values."""
    return x[:, :, rows].flatten(1, 2)


def _hidden(mask: Tensor | None, rows: slice, seen: slice, k: Tensor) -> Tensor:
    """[N or 1, rows, keys]: True where a query does not see a key, which without a mask is one that comes after it."""
    if mask is not None:
        return ~mask[:, :, rows, seen].expand(-1, len(k) // len(mask), -1, -1).flatten(0, 1)
    return torch.ones(1, rows.stop - rows.start, seen.stop, dtype=torch.bool, device=k.device).triu(rows.start + 1)


def _scores(products: Tensor, hidden: Tensor, head_dim: int) -> Tensor:
    """In float32; minus infinity where a query does not see a key."""
    return (products.float() * head_dim**-0.5).masked_fill(hidden, float("-inf"))


def _add(sums: list[Tensor], x: Tensor) -> None:
    """To what each piece of the keys has so far; the rest begins the next piece's."""
    sizes = [piece.shape[1] for piece in sums]
    *seen, new = x.float().split([*sizes, x.shape[1] - sum(sizes)], dim=1)
    sums[:] = [*map(torch.add, sums, seen), new]
