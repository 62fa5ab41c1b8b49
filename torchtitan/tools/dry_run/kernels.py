"""What a GPU's kernels save for backward, for the dry run: its fake tensors are on a CPU, whose kernels save more."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.bias import CausalBias
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from torchtitan.models.layers import FeedForward
from torchtitan.parallel import context
from torchtitan.parallel.context import GatheredAttention
from torchtitan.parallel.documents.attention import DocumentAttention, GatheredDocumentAttention


@contextmanager
def gpu_norms() -> Iterator[None]:
    """Inside, torch's RMS norm saves only its input and one number a row. A CPU's saves every value in between."""
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("rms_norm", _rms_norm, "AutogradCPU")
        yield


def _rms_norm(x: Tensor, shape: list[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    return _FusedNorm.apply(x, len(shape), weight)


class _FusedNorm(torch.autograd.Function):
    """An RMS norm without values: what it allocates and saves is all that counts."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, num_dims: int, weight: Tensor | None) -> Tensor:
        ctx.num_dims = num_dims
        ctx.save_for_backward(x, weight, torch.empty_like(x[..., :1], dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, arriving: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, _ = ctx.saved_tensors
        of_weight = None if weight is None else arriving.sum(tuple(range(x.ndim - ctx.num_dims)))
        return torch.empty_like(x), None, of_weight


@contextmanager
def real_biases() -> Iterator[None]:
    """Inside, context parallelism's causal biases are real: torch cannot make one from fake tensors."""
    make = context.causal_lower_right

    def without_modes(*size: int) -> CausalBias:
        with _disable_current_modes():
            return make(*size)

    with mock.patch.object(context, "causal_lower_right", without_modes):
        yield


def apply_compiled_swiglu(model: nn.Module) -> None:
    """Make each SwiGLU save what its compiled form does: backward computes the SiLU once more from its input."""
    for module in model.modules():
        if isinstance(module, FeedForward):
            module.forward = partial(_swiglu, module)  # type: ignore[method-assign]


def _swiglu(module: FeedForward, x: Tensor) -> Tensor:
    product: Tensor = _FusedProduct.apply(module.w1(x), module.w3(x))
    return module.w2(product)


class _FusedProduct(torch.autograd.Function):
    """silu(a) * b, without values."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return torch.empty_like(a)

    @staticmethod
    def backward(ctx: Any, arriving: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        return torch.empty_like(a), torch.empty_like(b)


def apply_gpu_attention(model: nn.Module, dtype: torch.dtype) -> None:
    """Make context parallelism's attention store no causal bias. A CPU's kernel stores the bias as a whole mask.

    In float32 a mask keeps documents apart. Otherwise a GPU's kernel saves what the pieces of a CPU do.
    """
    for module in model.modules():
        if isinstance(module, (DocumentAttention, GatheredDocumentAttention)):
            module.by_mask = dtype == torch.float32
        elif isinstance(module, GatheredAttention):
            module.forward = partial(_without_bias, module.forward)  # type: ignore[method-assign]


def _without_bias(forward: Callable[..., Tensor], *args: Any) -> Tensor:
    with _PlainCausal():  # only here: inside this mode every operation takes ten times as long
        return forward(*args)


class _PlainCausal(TorchFunctionMode):
    """Calls the kernel of plain causal attention if the mask is a causal bias."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention and isinstance(kwargs.get("attn_mask"), CausalBias):
            kwargs = kwargs | {"attn_mask": None, "is_causal": True}
        return func(*args, **kwargs)
