"""Which operations of a block a recompute leaves out, because their outputs are kept."""

from collections import defaultdict
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

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


def keep_expensive_operations() -> Any:
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
