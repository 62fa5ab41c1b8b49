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
    """Stands for attention by torch's kernel, which has what is masked and what is long."""

    def __init__(self, by_kernel: nn.Module) -> None:
        super().__init__()
        self.by_kernel = by_kernel

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        if mask is not None or q.shape[1] > _LONGEST:
            return self.by_kernel(q, k, v, mask)
        return causal_attention(q, k, v)


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Of queries [B, S, H, D] to keys and values [B, S, KV heads, D]."""
    batch, kv_heads = k.shape[0], k.shape[2]
    q = q.unflatten(2, (kv_heads, -1)).permute(0, 2, 3, 1, 4).flatten(0, 1)  # [N, G, S, D]: queries of each key's head
    k, v = k.transpose(1, 2).flatten(0, 1), v.transpose(1, 2).flatten(0, 1)  # [N, S, D]
    out: Tensor = _CausalAttention.apply(q, k, v)
    return out.unflatten(0, (batch, kv_heads)).permute(0, 3, 1, 2, 4).flatten(2, 3)


class _CausalAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, sums = [], []
        for rows, seen in _pieces(q.shape[2]):
            scores = _scores(q[:, :, rows], k[:, seen])
            largest = scores.amax(-1, keepdim=True)
            exponentials = (scores - largest).exp()
            total = exponentials.sum(-1, keepdim=True)
            # Divided afterwards, when there is a value for each of D and not for each key
            out.append((_product(exponentials.to(v.dtype), v[:, seen]) / total).to(v.dtype))
            sums.append(largest + total.log())
        out, sums = torch.cat(out, dim=2), torch.cat(sums, dim=2)
        ctx.save_for_backward(q, k, v, out, sums)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, out, sums = ctx.saved_tensors
        of_out = (gradient.float() * out.float()).sum(-1, keepdim=True)
        of_q: list[Tensor] = []
        of_k: list[Tensor] = []  # these two in float32, a piece of the keys each
        of_v: list[Tensor] = []
        for rows, seen in _pieces(q.shape[2]):
            keys, arriving = k[:, seen], gradient[:, :, rows]
            probabilities = (_scores(q[:, :, rows], keys) - sums[:, :, rows]).exp()
            _add(of_v, _product_over_rows(probabilities.to(v.dtype), arriving))
            of_probabilities = _product(arriving, v[:, seen].transpose(1, 2)).float()
            of_scores = (probabilities * (of_probabilities - of_out[:, :, rows]) * q.shape[-1] ** -0.5).to(q.dtype)
            of_q.append(_product(of_scores, keys))
            _add(of_k, _product_over_rows(of_scores, q[:, :, rows]))
        return torch.cat(of_q, dim=2), torch.cat(of_k, dim=1).to(k.dtype), torch.cat(of_v, dim=1).to(v.dtype)


def _pieces(seq_len: int) -> Iterator[tuple[slice, slice]]:
    """Some queries, and the keys up to the last of them."""
    size = max(_LEAST_ROWS, -(-seq_len // _MOST_PIECES))
    for begin in range(0, seq_len, size):
        end = min(begin + size, seq_len)
        yield slice(begin, end), slice(0, end)


def _add(sums: list[Tensor], x: Tensor) -> None:
    """To what each piece of the keys has so far; the rest begins the next piece's."""
    sizes = [piece.shape[1] for piece in sums]
    *seen, new = x.float().split([*sizes, x.shape[1] - sum(sizes)], dim=1)
    sums[:] = [*map(torch.add, sums, seen), new]


def _scores(q: Tensor, k: Tensor) -> Tensor:
    """[N, G, rows, keys] in float32; minus infinity where a key comes after its query."""
    rows, keys = q.shape[2], k.shape[1]
    later = torch.ones(rows, keys, dtype=torch.bool, device=q.device).triu(keys - rows + 1)
    return (_product(q, k.transpose(1, 2)).float() * q.shape[-1] ** -0.5).masked_fill(later, float("-inf"))


def _product(x: Tensor, y: Tensor) -> Tensor:
    """[N, G, R, A] with [N, A, B]: one product for all G, which share y."""
    return torch.bmm(x.flatten(1, 2), y).unflatten(1, x.shape[1:3])


def _product_over_rows(x: Tensor, y: Tensor) -> Tensor:
    """[N, G, R, A] with [N, G, R, B], summed over G and R: [N, A, B]."""
    return torch.bmm(x.flatten(1, 2).transpose(1, 2), y.flatten(1, 2))
