"""Attention within documents on a CPU: torch's kernel takes one document after another, short ones together.

It is an operation of its own, because a compiler cannot see the lengths of documents, of which every batch has others.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

_TOGETHER = 128  # tokens of short documents that go through the kernel at once, under a mask
_SHORT = 256  # keys; backward of 100 takes a third of bfloat16's time in float32, of 300 as long, of more longer
_MAX_ROWS = 512  # queries of a document that begins on another rank, whose mask is stored

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@torch.library.custom_op("torchtitan::document_attention", mutates_args=())
def document_attention(q: Tensor, k: Tensor, v: Tensor, starts_q: Tensor, starts_k: Tensor) -> tuple[Tensor, Tensor]:
    """Attention of queries [T, H, D] to keys and values [T', KV heads, D] of the same document, up to its own key.

    Document i has the queries and keys from `starts[i]` to `starts[i + 1]`; the last key is the last query's. The
    second result is the logarithm of the sum of a query's exponentials [T, H].
    """
    out, log_sums = q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=torch.promote_types(q.dtype, torch.float32))
    for rows, keys, mask in _pieces(starts_q, starts_k, q.dtype):
        values, sums = _forward(_heads(q, rows), _heads(k, keys), _heads(v, keys), 0.0, mask is None, attn_mask=mask)
        out[rows], log_sums[rows] = values[0].transpose(0, 1), sums[0].T
    return out, log_sums


@document_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, starts_q: Tensor, starts_k: Tensor) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=torch.promote_types(q.dtype, torch.float32))


@torch.library.custom_op("torchtitan::document_attention_backward", mutates_args=())
def document_attention_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sums: Tensor, starts_q: Tensor, starts_k: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    of_q, of_k, of_v = q.new_empty(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape)
    for rows, keys, mask in _pieces(starts_q, starts_k, q.dtype):
        dtype = log_sums.dtype if keys.stop - keys.start <= _SHORT else q.dtype
        places = zip((gradient, q, k, v, out), (rows, rows, keys, keys, rows), strict=True)
        parts = (_heads(x, place).to(dtype) for x, place in places)
        sums, added = log_sums[rows].T[None], None if mask is None else mask.to(dtype)
        found = _backward(*parts, sums, 0.0, mask is None, attn_mask=added)
        of_rows, *of_keys = (part[0].transpose(0, 1) for part in found)
        of_q[rows] = of_rows
        of_k[keys] += of_keys[0]
        of_v[keys] += of_keys[1]
    return of_q, of_k, of_v


@document_attention_backward.register_fake
def _(gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, *starts = inputs
    ctx.save_for_backward(q, k, v, *output, *starts)


def _differentiate(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    return *document_attention_backward(gradient, *ctx.saved_tensors), None, None


document_attention.register_autograd(_differentiate, setup_context=_save)


def _heads(x: Tensor, part: slice) -> Tensor:
    return x[part].transpose(0, 1)[None]  # [1, H, T, D]


def _pieces(starts_q: Tensor, starts_k: Tensor, dtype: torch.dtype) -> Iterator[tuple[slice, slice, Tensor | None]]:
    """Yield some queries, their keys, and what is added to their scores; None stands for the causal mask."""
    q, k = starts_q.tolist(), starts_k.tolist()
    first, last = 0, 1
    while last < len(q):
        num_earlier = k[last] - k[first] - (q[last] - q[first])
        if num_earlier:  # keys of a document that begins on another rank
            for begin in range(q[first], q[last], _MAX_ROWS):
                end = min(begin + _MAX_ROWS, q[last])
                keys = slice(k[first], k[last] - q[last] + end)
                seen = torch.ones(end - begin, keys.stop - keys.start, dtype=torch.bool)
                yield slice(begin, end), keys, _added(seen.tril(num_earlier + begin - q[first]), dtype)
        else:
            while last + 1 < len(q) and q[last + 1] - q[first] == k[last + 1] - k[first] <= _TOGETHER:
                last += 1
            rows, keys = slice(q[first], q[last]), slice(k[first], k[last])
            if len(set(q[first : last + 1])) == 2:
                yield rows, keys, None
            elif rows.start < rows.stop:
                numbers = torch.bucketize(torch.arange(rows.start, rows.stop), torch.tensor(q[first:last]), right=True)
                yield rows, keys, _added((numbers[:, None] == numbers).tril(), dtype)
        first, last = last, last + 1


def _added(seen: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, float("-inf"))
