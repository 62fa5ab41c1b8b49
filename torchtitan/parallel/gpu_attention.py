"""Picks the kernel that computes attention fastest on a GPU. A run on a CPU does not load this file."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch.backends import cuda
from torch.nn.attention import SDPBackend, sdpa_kernel


def attends_by_document(dtype: torch.dtype, head_size: int) -> bool:
    """Whether FlashAttention, which knows sequences of unlike lengths, takes this type and size of heads here."""
    q = torch.empty(1, 1, 128, head_size, device="cuda", dtype=dtype, requires_grad=True)
    return cuda.can_use_flash_attention(cuda.SDPAParams(q, q, q, None, 0.0, True, False))


def pick_attention(
    device: torch.device,
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    head_dim: int,
    seq_len: int,
    keeps_apart: bool,
) -> tuple[str, AbstractContextManager]:
    """Return the name of the kernel that computes attention on this GPU, and a context in which torch tries it first.

    On Hopper and data-centre Blackwell the fastest kernel is cuDNN's, from version 9.15.1 on: 631 TFLOP/s on an H100,
    where FlashAttention-2 reaches 329 (https://github.com/pytorch/pytorch/issues/142132). With a mask and a length that
    128 does not divide, cuDNN's gradients may be NaN (https://github.com/pytorch/pytorch/issues/196678), so it is tried
    last there. Documents are kept apart by FlashAttention, or else by a mask. On a CPU the name is "".
    """
    if device.type != "cuda":
        return "", nullcontext()
    if keeps_apart and attends_by_document(dtype, head_dim):
        return "FlashAttention, which knows where documents begin", nullcontext()
    flash = "FlashAttention", SDPBackend.FLASH_ATTENTION, cuda.can_use_flash_attention
    cudnn = "cuDNN", SDPBackend.CUDNN_ATTENTION, cuda.can_use_cudnn_attention
    others = ("memory-efficient attention", SDPBackend.EFFICIENT_ATTENTION, cuda.can_use_efficient_attention)
    is_new = torch.cuda.get_device_capability(device)[0] in (9, 10) and (torch.backends.cudnn.version() or 0) > 91500
    order = [cudnn, flash, others] if is_new and not (keeps_apart and seq_len % 128) else [flash, others, cudnn]

    # CausalAttention repeats KV heads in these two cases
    kv_heads = heads if keeps_apart or dtype == torch.float32 else kv_heads
    q, k = (torch.empty(1, n, 128, head_dim, device=device, dtype=dtype, requires_grad=True) for n in (heads, kv_heads))
    mask = torch.ones(1, 1, 128, 128, device=device, dtype=torch.bool) if keeps_apart else None
    taken = cuda.SDPAParams(q, k, k, mask, 0.0, mask is None, kv_heads < heads)
    name = next((name for name, _, can in order if can(taken)), "separate products and a softmax")
    if keeps_apart:
        name += f" under a mask of documents, because FlashAttention does not take {dtype} with heads of {head_dim}"
    return name, sdpa_kernel([*(backend for _, backend, _ in order), SDPBackend.MATH], set_priority=True)
