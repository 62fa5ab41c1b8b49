"""Recompute activations in backward: all of every block, of every n-th, or some operations of each.

A block stays the module that it was; only its `forward` is replaced, so no name changes. A recompute begins with the
buffers that the first pass began with, and leaves no trace in them: a BatchNorm counts each batch once.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from torchtitan.config.schema import ActivationCheckpoint

# Outputs to keep: the operations that cost most to compute or to send again.
_SAVED_OPERATIONS = {
    torch.ops.aten.mm.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._efficient_attention_forward.default,  # a piece under context parallelism, in float32
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
    torch.ops.aten.max.default,  # a scale of float8
    torch.ops.aten.topk.default,  # the experts of a token
    torch.ops._c10d_functional.all_to_all_single.default,  # rows on their way to experts
    *((torch.ops.aten._grouped_mm.default,) if hasattr(torch, "_grouped_mm") else ()),
}

_ATTENTION = {"torchtitan", "torch_attn"}  # operations of these libraries keep documents apart


def apply_recompute(
    model: nn.Module,
    layers: Sequence[str],
    config: ActivationCheckpoint,
    compiles: bool = False,
    in_one: bool = True,
) -> None:
    """Make layers recompute, and keep the buffers of those that recompute or compile as they were before forward.

    `layers` are the names of the whole model's, so that every n-th is the same on any stage of a pipeline. Where a
    layer is not compiled `in_one` piece, the recompute is around its pieces, and no part of them.
    """
    if compiles:
        settings = torch._functorch.config
        settings.activation_memory_budget = config.memory_budget if config.mode == "memory_budget" else 1.0
        if hasattr(settings, "unsafe_treat_script_objects_as_zero_size"):
            # With tensor parallelism the compiler also saves meshes, whose size torch 2.13 does not know.
            settings.unsafe_treat_script_objects_as_zero_size = True
    options: dict[str, Any] = {
        "use_reentrant": False,
        "preserve_rng_state": config.preserve_rng_state,
        "determinism_check": config.determinism_check,
        "early_stop": config.early_stop,
    }
    if config.by_operation:
        options["context_fn"] = keep_expensive_operations
    every = 1 if config.by_operation or config.mode != "selective" else int(config.selective_ac_option)
    present = dict(model.named_modules())
    buffers = [(holder, leaf) for holder in present.values() for leaf, b in holder._buffers.items() if b is not None]
    for number, name in enumerate(layers):
        if name not in present:
            continue
        recomputes = config.mode in ("full", "selective") and number % every == 0
        own = {id(buffer) for buffer in present[name].buffers()}
        places = [(holder, leaf) for holder, leaf in buffers if id(getattr(holder, leaf)) in own]
        if recomputes or (compiles and places):
            if compiles and places:  # the compiler, too, is to leave out a change of a buffer when it recomputes
                torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True
            forward = _apart(present[name].forward, places, options if recomputes else None)
            whole = in_one or not compiles
            present[name].forward = forward if whole else torch.compiler.disable(forward, recursive=False)


def _apart(
    forward: Callable[..., Any], places: Sequence[tuple[nn.Module, str]], options: dict[str, Any] | None
) -> Callable[..., Any]:
    """A forward that works on copies of these buffers and leaves them in their places; with options it recomputes.

    So the tensors from before stay as they were. A recompute begins with them, and so does the backward that a
    compiler makes: torch 2.13 saves a buffer there without a copy, and reads the changed one in backward.
    """
    first = {id(getattr(holder, leaf)): n for n, (holder, leaf) in reversed(list(enumerate(places)))}
    alike = [first[id(getattr(holder, leaf))] for holder, leaf in places]  # a buffer under two names stays one

    def hold(tensors: Sequence[Tensor]) -> None:
        for (holder, leaf), tensor in zip(places, tensors, strict=True):
            setattr(holder, leaf, tensor)

    def hold_copies(tensors: Sequence[Tensor]) -> None:
        copies = {n: tensors[n].clone() for n in set(alike)}
        hold([copies[n] for n in alike])

    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        before = [getattr(holder, leaf) for holder, leaf in places]
        if options is None or torch.compiler.is_compiling():
            hold_copies(before)
            return forward(*args, **kwargs) if options is None else checkpoint(forward, *args, **options, **kwargs)
        is_first = True

        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal is_first
            now, recomputes = [getattr(holder, leaf) for holder, leaf in places], not is_first
            is_first = False
            hold_copies(before)
            try:
                return forward(*args, **kwargs)
            finally:
                if recomputes:
                    hold(now)

        return checkpoint(run, *args, **options, **kwargs)

    return call


class Aside:
    """What a hook does inside a recomputed block, as FSDP's gathers, is no part of what is kept or recomputed."""

    now = 0

    def __init__(self, hook: Callable[..., Any]) -> None:
        self.hook = hook

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        Aside.now += 1
        try:
            return self.hook(*args, **kwargs)
        finally:
            Aside.now -= 1


def _past_hooks(mode: Any) -> Any:
    """A mode of torch's selective checkpoint that does not see what happens aside."""
    kind = type(mode)

    def dispatch(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if Aside.now:
            return func(*args, **(kwargs or {}))
        return kind.__torch_dispatch__(self, func, types, args, kwargs)

    mode.__class__ = type(kind.__name__, (kind,), {"__torch_dispatch__": dispatch})
    return mode


def keep_expensive_operations() -> Any:
    """Save attention and every second matrix product: half the products' memory for half their cost again."""
    seen: dict[str, int] = defaultdict(int)

    def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        pass_name = "recompute" if context.is_recompute else "forward"
        if operation == torch.ops.aten.mm.default:
            seen[pass_name] += 1
            if seen[pass_name] % 2 == 0:
                return CheckpointPolicy.PREFER_RECOMPUTE
        saved = operation in _SAVED_OPERATIONS or operation.namespace in _ATTENTION
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    return tuple(map(_past_hooks, create_selective_checkpoint_contexts(policy)))
