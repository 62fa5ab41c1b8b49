"""Muon for some of the matrices, AdamW for everything else, behind one optimizer."""

import torch
from torch import nn

from torchtitan.training.optimizer.apply import divide_gradients


class MuonAndAdamW(torch.optim.Optimizer):
    """Muon for the given matrices, AdamW for its own parameters, with one learning rate and one weight decay.

    Muon's updates are scaled to the size of AdamW's (arXiv:2502.16982), so that the one learning rate suits both.
    """

    def __init__(self, matrices: list[nn.Parameter], adamw: torch.optim.AdamW) -> None:
        options = adamw.defaults
        self.muon = torch.optim.Muon(
            matrices, lr=options["lr"], weight_decay=options["weight_decay"], adjust_lr_fn="match_rms_adamw"
        )
        self.adamw = adamw
        super().__init__([*self.muon.param_groups, *adamw.param_groups], options)
        # All three share the groups and the states, so a learning rate set on this optimizer reaches the two inside.
        self.muon.state = adamw.state = self.state

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        if self.defaults["fused"]:  # apply_update set the divisor here; torch's Muon does not read it
            self.adamw.grad_scale, self.adamw.found_inf = self.grad_scale, self.found_inf  # type: ignore[attr-defined]
            divide_gradients(self.muon, self.grad_scale)  # type: ignore[attr-defined]
        self.muon.step()
        self.adamw.step()
