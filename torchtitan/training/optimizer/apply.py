"""Applying an optimizer: clip and update, and states before the first update."""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


@torch.no_grad()
def apply_update(
    optimizer: torch.optim.Optimizer,
    learning_rate: float,
    gradient_norm: Tensor,
    max_norm: float = float("inf"),
    scale: Tensor | float = 1.0,
) -> None:
    """Update the parameters once at this learning rate, with gradients scaled down to a norm of at most `max_norm`.

    Gradients, but not the norm, are `scale` times too large. Fused AdamW scales and updates in one pass on the device.
    If the norm is not finite, fused AdamW changes nothing; others write what is no number, and the run ends.
    """
    divisor = ((gradient_norm + 1e-6) / max_norm).clamp(min=1.0) * scale
    for group in optimizer.param_groups:
        group["lr"] = learning_rate * group.get("relative_rate", 1.0)
    if optimizer.defaults["fused"]:
        # torch's GradScaler sets these two to make a fused optimizer divide or skip. No value travels to the host.
        optimizer.grad_scale = divisor  # type: ignore[attr-defined]
        optimizer.found_inf = (~gradient_norm.isfinite()).float()  # type: ignore[attr-defined]
    else:
        divide_gradients(optimizer, divisor)
    optimizer.step()
    optimizer.zero_grad()


def make_states(optimizer: torch.optim.Optimizer) -> None:
    """Create the states that the first update would create, where there are none; parameters stay as they are.

    Each such parameter gets an update with a zero gradient at a learning rate of 0; the step counts are then reset.
    """
    kept: list[dict[str, Any]] = [
        {key: group[key] for key in ("lr", "weight_decay") if key in group} for group in optimizer.param_groups
    ]
    for group in optimizer.param_groups:
        group.update({"weight_decay": 0.0} if "weight_decay" in group else {})  # some add it to the gradient
    for group in optimizer.param_groups:
        for parameter in [p for p in group["params"] if p not in optimizer.state]:
            parameter.grad = torch.zeros_like(parameter)
            update_one(optimizer, group, parameter, 0.0)
            if "step" in optimizer.state.get(parameter, {}):
                optimizer.state[parameter]["step"].zero_()
    for group, values in zip(optimizer.param_groups, kept, strict=True):
        group.update(values)


def update_one(
    optimizer: torch.optim.Optimizer, own_group: dict[str, Any], parameter: Tensor, learning_rate: float
) -> None:
    """Update one parameter and free its gradient: for a moment the optimizer's groups hold nothing else."""
    everyone = [group["params"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["params"] = [parameter] if group is own_group else []
    apply_update(optimizer, learning_rate, torch.ones((), device=local_part(parameter).device))
    for group, parameters in zip(optimizer.param_groups, everyone, strict=True):
        group["params"] = parameters


def divide_gradients(optimizer: torch.optim.Optimizer, divisor: Tensor) -> None:
    """Divide every gradient of the optimizer's parameters in place."""
    gradients = [local_part(p.grad) for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    if gradients:
        torch._foreach_div_(gradients, divisor.to(gradients[0].device))


def local_part(tensor: Tensor) -> Tensor:
    """This rank's shard; if FSDP gathers the weight in float8, the plain tensor inside torchao's wrapper."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return getattr(local, "_tensor", local)


def plain(tensor: Tensor) -> Tensor:
    """Without torchao's wrapper, so that a checkpoint can be read without torchao."""
    return DTensor(local_part(tensor), tensor._spec, requires_grad=False) if isinstance(tensor, DTensor) else tensor
