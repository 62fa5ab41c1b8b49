"""Data parallelism by FSDP2's fully_shard, the one path for it: on one rank, on many, and with replicas (HSDP)."""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard


def apply_fsdp(
    model: nn.Module,
    units: list[list[nn.Module]],
    mesh: DeviceMesh,
    *,
    param_dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    reshard_after_forward: bool,
) -> None:
    """Shard each unit, and what is left over with the model itself; gradients are summed over ranks, not averaged."""
    policy = MixedPrecisionPolicy(
        param_dtype=param_dtype,
        reduce_dtype=reduce_dtype,
        # Activations already have param_dtype; the float32 rotary table must keep its own.
        cast_forward_inputs=False,
    )
    for unit in units:
        # The last unit's parameters are needed first in backward: freeing them would only gather them again.
        reshard = reshard_after_forward and unit is not units[-1]
        fully_shard(unit if len(unit) > 1 else unit[0], mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # The loss is already divided by the global number of tokens. SUM, because gloo has no scaled sum.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
