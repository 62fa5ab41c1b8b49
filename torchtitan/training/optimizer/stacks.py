"""Muon for stacks of matrices [E, out, in], such as the experts of a layer: each is a matrix of its own."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate


class StackedMuon(torch.optim.Optimizer):
    """What torch's Muon does with each matrix. Ranks that have whole matrices send nothing."""

    def __init__(self, stacks: list[nn.Parameter], like: torch.optim.Muon) -> None:
        super().__init__(stacks, dict(like.defaults))

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for stack in group["params"]:
                if stack.grad is None:
                    continue
                state = self.state[stack]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(stack.grad)
                state["momentum_buffer"].lerp_(stack.grad, 1 - group["momentum"])
                update = stack.grad.lerp(state["momentum_buffer"], group["momentum"])  # Nesterov's
                # As large as an update of AdamW (arXiv:2502.16982).
                rate = group["lr"] * 0.2 * max(stack.shape[1:]) ** 0.5
                stack.mul_(1 - group["lr"] * group["weight_decay"])
                stack.add_(_orthogonal(update, group), alpha=-rate)


def _orthogonal(update: Tensor, group: dict[str, Any]) -> Tensor:
    if not isinstance(update, DTensor):
        return _newton_schulz(update, group)
    mesh, placements = update.device_mesh, update.placements
    in_matrices = [place.is_shard() and not place.is_shard(0) for place in placements]
    whole = [Replicate() if inner else place for inner, place in zip(in_matrices, placements, strict=True)]
    gathered = update.redistribute(placements=whole) if any(in_matrices) else update
    local = _newton_schulz(gathered.to_local(), group)
    found = DTensor.from_local(
        local, mesh, gathered.placements, run_check=False, shape=update.shape, stride=update.stride()
    )
    return found.redistribute(placements=placements) if any(in_matrices) else found


def _newton_schulz(stack: Tensor, group: dict[str, Any]) -> Tensor:
    a, b, c = group["ns_coefficients"]
    x = stack.bfloat16()
    is_tall = x.shape[-2] > x.shape[-1]
    x = x.mT if is_tall else x
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=group["eps"])
    for _ in range(group["ns_steps"]):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if is_tall else x).to(stack.dtype)
