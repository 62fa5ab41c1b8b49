"""Updates during backward, so that a step never holds all gradients (`optimizer.early_step_in_backward`)."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torchtitan.training.optimizer.apply import update_one


def update_in_backward(
    optimizer: torch.optim.Optimizer, note: Callable[[Tensor], None], learning_rate: Callable[[], float]
) -> None:
    """Make backward update each parameter as soon as its gradient is complete, and free the gradient at once.

    `note` receives each gradient before the update. An `apply_update` after backward finds no gradients and does
    nothing.
    """

    def update(own_group: dict[str, Any], parameter: Tensor) -> None:
        assert parameter.grad is not None
        note(parameter.grad)
        update_one(optimizer, own_group, parameter, learning_rate())

    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.register_post_accumulate_grad_hook(functools.partial(update, group))
