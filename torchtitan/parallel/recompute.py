"""Recompute activations in backward: whole blocks, every n-th, or the cheap operations of each."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

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
}


def apply_recompute(model: nn.Module, layers: Sequence[str], config: ActivationCheckpoint) -> None:
    """Replace layers by ones that recompute. Parameter names do not change.

    `layers` are the names of the whole model's, so that every n-th is the same on any stage of a pipeline.
    """
    if config.mode == "none":
        return
    if config.mode == "memory_budget":
        settings = torch._functorch.config
        settings.activation_memory_budget = config.memory_budget
        if hasattr(settings, "unsafe_treat_script_objects_as_zero_size"):
            # With tensor parallelism the compiler also saves meshes, whose size torch 2.13 does not know.
            settings.unsafe_treat_script_objects_as_zero_size = True
        return
    every = 1 if config.by_operation or config.mode == "full" else int(config.selective_ac_option)
    context: dict[str, Any] = {"context_fn": _keep_expensive_operations} if config.by_operation else {}
    present = dict(model.named_modules())
    for name in layers[::every]:
        if name in present:
            wrapped = checkpoint_wrapper(
                present[name],
                preserve_rng_state=config.preserve_rng_state,
                determinism_check=config.determinism_check,
                early_stop=config.early_stop,
                **context,
            )
            model.set_submodule(name, wrapped)


def _keep_expensive_operations() -> Any:
    """Save attention and every second matrix product: half the products' memory for half their cost again."""
    seen: dict[str, int] = defaultdict(int)

    def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        pass_name = "recompute" if context.is_recompute else "forward"
        if operation == torch.ops.aten.mm.default:
            seen[pass_name] += 1
            if seen[pass_name] % 2 == 0:
                return CheckpointPolicy.PREFER_RECOMPUTE
        saved = operation in _SAVED_OPERATIONS
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
