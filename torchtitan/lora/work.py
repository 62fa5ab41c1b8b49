"""What training a part of a model takes: fewer FLOPs, because a frozen weight needs no gradient.

A blueprint here builds the model with its adapters and frozen weights (lora/run.py).
"""

import torch
from torch import nn

from torchtitan.config.schema import Config
from torchtitan.lora.names import is_adapter
from torchtitan.models.spec import Blueprint


def flops_per_token(blueprint: Blueprint, config: Config) -> int:
    """Model FLOPs of forward and backward: 4 a frozen parameter, 2 before the first part that is trained.

    The gradient reaches no further back than that. A parameter of the adapter counts 6, as any that is trained.
    """
    model, total, goes_back = _outline(blueprint), 0, False
    for part in blueprint.parts(config.training.seq_len):
        named = list(model.get_submodule(part.name).named_parameters())
        stacks = sum(p.numel() for _, p in named if p.ndim == 3)  # of experts
        used = 1 - part.unused / stacks if stacks else 1
        own = [(p.numel(), used if p.ndim == 3 else 1) for n, p in named if p.requires_grad and not is_adapter(n)]
        trained = round(sum(count * share for count, share in own))  # of what a token uses
        adapter = sum(p.numel() for n, p in named if is_adapter(n))
        goes_back = goes_back or bool(trained or adapter)
        if part.flops:  # a lookup multiplies nothing
            frozen = part.parameters - part.unused - trained
            total += part.flops - 2 * frozen if goes_back else part.flops // 3
            total += 6 * adapter
    return total


def describe_part(blueprint: Blueprint, config: Config) -> str:
    parameters = dict(_outline(blueprint).named_parameters())
    count = sum(parameter.numel() for parameter in parameters.values() if parameter.requires_grad)
    if config.lora.rank is None:
        return f" ({count:,} of them trained)"
    layers = sum(map(is_adapter, parameters)) // 2
    return f" (frozen) and an adapter of {count:,} on {layers} layers"


def _outline(blueprint: Blueprint) -> nn.Module:
    with torch.device("meta"):
        return blueprint.spec.build(blueprint.shape)
