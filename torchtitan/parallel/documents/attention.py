"""Attention of packed sequences in which no document sees another, in place of a model's causal attention.

On a CPU it goes by pieces, on a GPU by FlashAttention for sequences of unlike lengths. What that kernel cannot do (see
`gpu_attention.attends_by_document`) is done under a mask, which grows with the square of the length.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from torchtitan.parallel.context import GatheredAttention
from torchtitan.parallel.documents.pieces import document_attention
from torchtitan.parallel.gpu_attention import attends_by_document, by_flash_attention
from torchtitan.parallel.mesh import Mesh


def document_attention_for(mesh: Mesh, dtype: torch.dtype, head_size: int) -> Callable[[nn.Module], nn.Module]:
    """Return what makes the module that replaces a causal attention. Call it before a layer is compiled."""
    by_mask = mesh.devices.device_type == "cuda" and not attends_by_document(dtype, head_size)
    if (axis := mesh.devices["cp"]).size() > 1:
        return lambda causal: GatheredDocumentAttention(axis, causal, by_mask)
    return lambda causal: DocumentAttention(causal, by_mask)


class DocumentAttention(nn.Module):
    """Takes the documents' first positions [B, N] (see data.documents) instead of a mask."""

    def __init__(self, causal: nn.Module, by_mask: bool) -> None:
        super().__init__()
        self.causal, self.by_mask = causal, by_mask

    def forward(self, q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None) -> Tensor:
        if starts is None:  # one text, as a sample of what the model writes
            out: Tensor = self.causal(q, k, v, None)
            return out
        return attend(q, k, v, starts, self.causal if self.by_mask else None)


class GatheredDocumentAttention(GatheredAttention):
    """The same of this rank's two pieces over the keys and values of all ranks of the axis."""

    def __init__(self, axis: DeviceMesh, causal: nn.Module, by_mask: bool) -> None:
        super().__init__(axis)
        self.causal, self.by_mask = causal, by_mask

    def forward(self, q: Tensor, k: Tensor, v: Tensor, starts: Any) -> Tensor:
        return super().forward(q, k, v, (starts, starts))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, starts: Tensor) -> Tensor:
        return attend(q, k, v, starts, self.causal if self.by_mask else None)


def attend(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, masked: nn.Module | None) -> Tensor:
    """Attention of queries [B, Q, H, D] at the last of the positions whose keys and values [B, K, KV heads, D] are.

    With a module for attention under a mask, that module computes it.
    """
    num_queries, num_keys = q.shape[1], k.shape[1]
    first = num_keys - num_queries
    if masked is not None:
        out: Tensor = masked(q, k, v, document_mask(starts, first, num_keys))
        return out
    rows = torch.arange(len(q), dtype=torch.int32, device=q.device)[:, None]
    starts_q = starts_k = (starts.clamp(max=num_keys) + rows * num_keys).flatten()
    if first:  # a document that ends before the first query has keys, but no queries
        starts_q = (starts.clamp(first, num_keys) - first + rows * num_queries).flatten()
    inputs = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), starts_q, starts_k
    out = by_flash_attention(*inputs, num_queries, num_keys) if q.is_cuda else document_attention(*inputs)[0]
    return out.unflatten(0, q.shape[:2])


def document_mask(starts: Tensor, first: int, end: int) -> Tensor:
    """True where a query from position `first` on may see a key before `end`: not later, of the same document."""
    numbers = document_numbers(starts, end)
    mask = numbers[:, first:, None] == numbers[:, None]
    return mask.tril(first)[:, None]  # [B, 1, queries, keys]


def document_numbers(starts: Tensor, end: int) -> Tensor:
    """The number, from 0, of the document at each position before `end`: [B, end]."""
    everywhere = torch.arange(end, dtype=starts.dtype, device=starts.device)
    return (starts[:, None] <= everywhere[:, None]).sum(-1) - 1
