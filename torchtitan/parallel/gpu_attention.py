"""Picks the kernel that computes attention fastest on a GPU. A plain run on a CPU does not load this file."""

import inspect
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.compiler.config
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.backends import cuda
from torch.nn.attention import (
    SDPBackend,
    activate_flash_attention_impl,
    current_flash_attention_impl,
    restore_flash_attention_impl,
    sdpa_kernel,
)
from torch.nn.attention.varlen import varlen_attn

from torchtitan.parallel.collectives import max_over

# What torch can run in place of its own FlashAttention, by torch's names: on GPUs of which generations (the first digit
# of their compute capability), and the package and the file in it that torch imports.
_PACKAGES = {"FA3": ((9,), "flash_attn_interface", ""), "FA4": ((9, 10), "flash_attn", "cute/interface.py")}
_LEAST_GAIN = 0.03  # what a package must gain, because a run that resumes measures again
_MOST_GAP = 0.02  # between results that differ by bfloat16's rounding alone, in parts of their norm
_MOST_TOKENS = 8192
_flash_attention: Any = partial(varlen_attn, window_size=(-1, 0))  # causal
if "enable_gqa" in inspect.signature(varlen_attn).parameters:  # torch 2.11 takes grouped heads without being asked
    _flash_attention = partial(_flash_attention, enable_gqa=True)


def attends_by_document(dtype: torch.dtype, head_size: int) -> bool:
    """Whether FlashAttention, which knows sequences of unlike lengths, takes this type and size of heads here."""
    q = torch.empty(1, 1, 128, head_size, device="cuda", dtype=dtype, requires_grad=True)
    return cuda.can_use_flash_attention(cuda.SDPAParams(q, q, q, None, 0.0, True, False))


def by_flash_attention(
    q: Tensor, k: Tensor, v: Tensor, starts_q: Tensor, starts_k: Tensor, longest_q: int, longest_k: int
) -> Tensor:
    """The same as `documents.pieces.document_attention`.

    A document may be shorter than the longest, whose true length the host does not know, and may have no query.
    """
    return _flash_attention(q, k, v, starts_q, starts_k, longest_q, longest_k)


class Case(NamedTuple):
    """The attention that a rank computes."""

    device: torch.device
    dtype: torch.dtype
    heads: int
    kv_heads: int
    head_dim: int
    seq_len: int
    keeps_apart: bool  # documents


def pick_attention(case: Case, in_pieces: bool = False) -> tuple[str, AbstractContextManager]:
    """Return the name of the kernel that computes attention on this GPU, and a context in which torch tries it first.

    Where every rank has FlashAttention 3 or 4 and a GPU for it, all ranks measure it beside torch's own choice, and
    take what is fastest on the slowest rank and computes the same. With deterministic algorithms torch's choice stays:
    a run that resumes might measure otherwise. It stays for the pieces of context parallelism, too: torch computes them
    by another kernel than the trial's causal attention. On a CPU the name is "".
    """
    if case.device.type != "cuda":
        return "", nullcontext()
    name, order, takes_flash = _choice_of_torch(case)
    measures = takes_flash and not in_pieces and not torch.are_deterministic_algorithms_enabled()
    here = installed(torch.cuda.get_device_capability(case.device)[0]) if measures else []
    lacking = _worst([package not in here for package in _PACKAGES])
    packages = [package for package, lacks in zip(_PACKAGES, lacking, strict=True) if not lacks]
    if not packages:
        return name, attention_by(order)
    flash_first = [SDPBackend.FLASH_ATTENTION, *order] if order else order
    ways = [partial(attention_by, order), *(partial(attention_by, flash_first, package) for package in packages)]
    kernel = name.split(",")[0]
    names = [kernel, *(f"FlashAttention {package.removeprefix('FA')}" for package in packages)]
    best, times = _fastest(names, ways, trial(case._replace(seq_len=min(case.seq_len, _MOST_TOKENS))))
    return f"{names[best]}{name.removeprefix(kernel)} (forward and backward: {times})", ways[best]()


def _choice_of_torch(case: Case) -> tuple[str, list[SDPBackend], bool]:
    """The kernel's name, the order in which torch tries kernels, and whether FlashAttention can compute this.

    On Hopper and data-centre Blackwell the fastest kernel is cuDNN's, from version 9.15.1 on: 631 TFLOP/s on an H100,
    where FlashAttention-2 reaches 329 (https://github.com/pytorch/pytorch/issues/142132). With a mask and a length that
    128 does not divide, cuDNN's gradients may be NaN (https://github.com/pytorch/pytorch/issues/196678), so it is tried
    last there. Documents are kept apart by FlashAttention, or else by a mask.
    """
    device, dtype, heads, kv_heads, head_dim, seq_len, keeps_apart = case
    if keeps_apart and attends_by_document(dtype, head_dim):
        return "FlashAttention, which knows where documents begin", [], True
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
    takes_flash = not keeps_apart and cuda.can_use_flash_attention(taken)
    return name, [*(backend for _, backend, _ in order), SDPBackend.MATH], takes_flash


def installed(generation: int) -> list[str]:
    """The packages that are installed and run on GPUs of this generation. None is imported: that takes seconds."""
    found = []
    for package, (generations, module, file) in _PACKAGES.items():
        try:
            spec = find_spec(module) if generation in generations else None
        except ValueError:  # something else made a module of this name, without a spec
            spec = None
        if spec and (not file or any(Path(place, file).is_file() for place in spec.submodule_search_locations or ())):
            found.append(package)
    return found


@contextmanager
def attention_by(order: Sequence[SDPBackend], package: str = "") -> Iterator[None]:
    """torch tries kernels in this order, or in its own, with a package's FlashAttention in place of its own.

    The operators stay torch's, so what compiles, recomputes or keeps documents apart needs to know no package. But
    torch's caches of compiled graphs do not know the order (https://github.com/pytorch/pytorch/issues/185449), so a tag
    in their keys names it: without the tag a run would compute by the kernel that an earlier run compiled.
    """
    chosen = " ".join([torch.compiler.config.cache_key_tag, *(backend.name for backend in order), package])
    with ExitStack() as stack:
        stack.enter_context(torch.compiler.config.patch(cache_key_tag=chosen))  # type: ignore[attr-defined]
        if order:
            stack.enter_context(sdpa_kernel([*order], set_priority=True))
        if package:
            stack.callback(_put_back, current_flash_attention_impl())
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Warning only once for all operators")  # that it takes torch's place
                activate_flash_attention_impl(package)
        yield


def _put_back(package: str | None) -> None:
    """Activate what was active before, also after an activation that failed and left torch's flag set."""
    torch._C._set_sdp_use_fa3(False)  # torch's own restore clears it only if the activation succeeded
    if current_flash_attention_impl():
        restore_flash_attention_impl()
    if package:
        activate_flash_attention_impl(package)


def _fastest(
    names: Sequence[str], ways: Sequence[Callable[[], AbstractContextManager]], attend: Callable[[], Sequence[Tensor]]
) -> tuple[int, str]:
    """Which way is fastest on the slowest rank, the first unless another gains enough, and what each took there.

    A way whose results differ from the first one's fails.
    """
    least, failed = [math.inf] * len(ways), [""] * len(ways)
    expected: Sequence[Tensor] = ()
    for is_warm in (False, True, True):  # in turn, because a GPU's clock changes; FlashAttention 4 compiles first
        for number, way in enumerate(ways):
            if failed[number]:
                continue
            try:
                with way():
                    results = () if is_warm else attend()
                    took = _milliseconds(attend)
                expected = expected or results
                if not is_warm and not (gap := _gap(results, expected)) <= _MOST_GAP:  # NaN, too
                    failed[number] = f"its results differ from {names[0]}'s by {gap:.1%}, more than {_MOST_GAP:.0%}"
            except Exception as error:  # what a package of an unfit version raises is not known beforehand
                took, failed[number] = math.inf, f"{type(error).__name__}: {error}".partition("\n")[0]
            least[number] = min(least[number], took) if is_warm and not failed[number] else math.inf
    slowest = _worst(least)
    best = min(range(len(ways)), key=slowest.__getitem__)
    if slowest[best] > (1 - _LEAST_GAIN) * slowest[0]:
        best = 0
    told = [
        f"{name} {took:.2f} ms" if took < math.inf else f"{name} fails, {why or 'on another rank'}"
        for name, took, why in zip(names, slowest, failed, strict=True)
    ]
    return best, ", ".join(told)


def _gap(results: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The largest of the differences, each in parts of the norm of what was expected."""
    pairs = [(ours.float(), other.float()) for ours, other in zip(results, expected, strict=True)]
    return torch.stack([(ours - other).norm() / other.norm() for ours, other in pairs]).max().item()


def _worst(values: Sequence[float]) -> list[float]:
    """The largest of all ranks' values, one by one, over gloo."""
    mine, ranks = torch.tensor(values, dtype=torch.float64), dist.group.WORLD
    worst: list[float] = (mine if ranks is None else max_over(mine, ranks)).tolist()
    return worst


def trial(case: Case) -> Callable[[], Sequence[Tensor]]:
    """Attention of one sequence, with its gradients.

    If documents are kept apart, it has four of unlike lengths, and then empty ones, as data.documents pads a batch.
    """
    device, dtype, heads, kv_heads, head_dim, seq_len, keeps_apart = case
    draws = torch.Generator(device).manual_seed(0)
    sizes = (heads, kv_heads, kv_heads)
    q, k, v = (torch.randn(1, seq_len, n, head_dim, generator=draws, device=device, dtype=dtype) for n in sizes)
    inputs = q.requires_grad_(), k.requires_grad_(), v.requires_grad_()
    starts = torch.full((max(16, seq_len // 128),), seq_len, dtype=torch.int32, device=device)
    starts[:4] = torch.tensor([0, 4, 5, 8], device=device) * seq_len // 10

    def attend() -> Sequence[Tensor]:
        if keeps_apart:
            out = by_flash_attention(q[0], k[0], v[0], starts, starts, seq_len, seq_len)
        else:
            q_, k_, v_ = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # [B, H, S, D]
            out = F.scaled_dot_product_attention(q_, k_, v_, is_causal=True, enable_gqa=kv_heads < heads)
        return out.detach(), *torch.autograd.grad(out, inputs, out.detach())

    return attend


def _milliseconds(attend: Callable[[], object], calls: int = 3) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(calls):
        attend()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / calls
