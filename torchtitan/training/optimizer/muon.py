"""Muon for some of the matrices, AdamW for everything else, behind one optimizer."""

import re
from collections.abc import Callable, Iterable

import torch
from torch import nn

from torchtitan.observe.log import logger
from torchtitan.refusal import Refusal
from torchtitan.training.optimizer.apply import divide_gradients


class MuonAndAdamW(torch.optim.Optimizer):
    """Muon for the given matrices and stacks of them, AdamW for its own parameters, with one learning rate and decay.

    Muon's updates are scaled to the size of AdamW's (arXiv:2502.16982), so that the one learning rate suits both.
    """

    def __init__(self, found: list[nn.Parameter], adamw: torch.optim.AdamW) -> None:
        matrices, stacks = ([p for p in found if p.ndim == dims] for dims in (2, 3))
        options = adamw.defaults
        self.muon = torch.optim.Muon(
            matrices, lr=options["lr"], weight_decay=options["weight_decay"], adjust_lr_fn="match_rms_adamw"
        )
        self.adamw = adamw
        self.by_muon: list[torch.optim.Optimizer] = [self.muon]
        if stacks:
            from torchtitan.training.optimizer.stacks import StackedMuon

            self.by_muon.append(StackedMuon(stacks, self.muon))
        inner = [*self.by_muon, adamw]
        super().__init__([group for each in inner for group in each.param_groups], options)
        # All share the groups and the states, so a learning rate set on this optimizer reaches those inside.
        for each in inner:
            each.state = self.state

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        if self.defaults["fused"]:  # apply_update set the divisor here; torch's Muon does not read it
            self.adamw.grad_scale, self.adamw.found_inf = self.grad_scale, self.found_inf  # type: ignore[attr-defined]
            for each in self.by_muon:
                divide_gradients(each, self.grad_scale)  # type: ignore[attr-defined]
        for each in (*self.by_muon, self.adamw):
            each.step()


def find_matrices(named: Iterable[tuple[str, nn.Parameter]], takes_muon: Callable[[str], bool]) -> list[nn.Parameter]:
    """The matrices for Muon, also in stacks. AdamW keeps norms and biases, and the log lists what else it keeps."""
    matrices, left_to_adamw = [], []
    for name, parameter in named:
        if parameter.ndim > 3 and takes_muon(name):
            raise Refusal(
                f'optimizer.name = "Muon", but {name} has the shape {list(parameter.shape)}, and Muon updates only '
                f'matrices and stacks of them; set optimizer.name = "AdamW", or make the model\'s takes_muon return '
                f"False for this name, so that AdamW updates it"
            )
        if parameter.ndim in (2, 3) and takes_muon(name):
            matrices.append(parameter)
        elif parameter.ndim > 2:
            left_to_adamw.append(re.sub(r"\.\d+\.", ".*.", name))  # one entry for the same weight of all blocks
    if left_to_adamw:
        names = ", ".join(dict.fromkeys(left_to_adamw))
        logger.info(f"AdamW updates these weights, which have too many dimensions for Muon: {names}")
    return matrices
