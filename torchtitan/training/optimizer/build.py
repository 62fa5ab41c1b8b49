"""Building the optimizer: which parameters AdamW updates, which Muon updates, and in which groups."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from torchtitan.config.schema import Compile, Optimizer

# The first update of n sharded tensors in one call takes time n^2: 2.3 s for the 723 tensors of Llama 3 70B.
_MOST_IN_A_GROUP = 100


def _within_blocks(name: str) -> bool:
    """Whether the parameter belongs to a block; the rows of embedding and output are tokens, which do not suit Muon."""
    return name.startswith("layers.")


def build_optimizer(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    config: Optimizer,
    compile_: Compile | None = None,
    takes_muon: Callable[[str], bool] = _within_blocks,
) -> torch.optim.Optimizer:
    """AdamW, or Muon for the matrices whose names `takes_muon` accepts and AdamW for all other parameters."""
    named = [(name, p) for name, p in named_parameters if p.requires_grad]
    if config.name == "AdamW":
        return _build_adamw([p for _, p in named], config, compile_)
    from torchtitan.training.optimizer.muon import MuonAndAdamW, find_matrices

    matrices = find_matrices(named, takes_muon)
    chosen = set(matrices)
    adamw = _build_adamw([p for _, p in named if p not in chosen], config, compile_)
    return MuonAndAdamW(matrices, adamw) if matrices else adamw


def _build_adamw(parameters: list[nn.Parameter], config: Optimizer, compile_: Compile | None) -> torch.optim.AdamW:
    """AdamW with weight decay on every parameter, or on all but norms and biases."""
    groups: list[dict[str, Any]] = [{"params": parameters}]
    if not config.weight_decay_norms_and_biases:
        groups = [
            {"params": [p for p in parameters if p.ndim > 1]},
            {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
        ]
    groups = split_groups(groups)
    options: dict[str, Any] = {
        "lr": config.lr,
        "betas": (config.beta1, config.beta2),
        "eps": config.eps,
        "weight_decay": config.weight_decay,
        "fused": config.implementation == "fused",
        "foreach": config.implementation == "foreach",
    }
    if config.moments_dtype == "bfloat16":
        from torchtitan.training.optimizer.bfloat16 import BFloat16AdamW

        return BFloat16AdamW(groups, compile_ if compile_ and compile_.enable else None, **options)
    return torch.optim.AdamW(groups, **options)


def split_groups(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Groups that torch updates at once: of parameters on one mesh, and not too many."""
    mesh_of = {p: getattr(p, "device_mesh", None) for group in groups for p in group["params"]}
    meshes = dict.fromkeys(mesh_of.values())
    split = [g | {"params": [p for p in g["params"] if mesh_of[p] == mesh]} for g in groups for mesh in meshes]
    return [
        group | {"params": group["params"][begin : begin + _MOST_IN_A_GROUP]}
        for group in split
        for begin in range(0, len(group["params"]), _MOST_IN_A_GROUP)
    ] or [{**groups[0], "params": []}]  # a pipeline stage whose weights are all frozen
