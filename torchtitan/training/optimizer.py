"""AdamW over a model's parameters, and the update that leaves itself out when the gradients are not finite."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from torchtitan.config.schema import Optimizer


def build_optimizer(parameters: Iterable[nn.Parameter], config: Optimizer) -> torch.optim.AdamW:
    """AdamW; weight decay on everything, or on matrices only."""
    parameters = [p for p in parameters if p.requires_grad]
    matrices = [p for p in parameters if p.ndim > 1]
    vectors = [p for p in parameters if p.ndim <= 1]
    groups = [{"params": parameters}]
    if not config.weight_decay_norms_and_biases:
        groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    return getattr(torch.optim, config.name)(
        groups,
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        weight_decay=config.weight_decay,
        fused=config.implementation == "fused",
        foreach=config.implementation == "foreach",
    )


def apply_update(optimizer: torch.optim.AdamW, learning_rate: float, gradient_norm: Tensor) -> None:
    """One update at this rate; a fused one changes nothing when the norm is not finite, decided on the device."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    if optimizer.defaults["fused"]:
        # What torch's GradScaler sets to make a fused optimizer skip: no value ever travels to the host.
        optimizer.found_inf = (~gradient_norm.isfinite()).float()  # type: ignore[attr-defined]
    optimizer.step()
    optimizer.zero_grad()
