"""Everything after backward: the gradient norm, the optimizer's update, and values that depend on the new weights."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from torchtitan.config.schema import Config
from torchtitan.parallel.collectives import GlobalNorm
from torchtitan.parallel.parts import ModelParts
from torchtitan.training.optimizer import apply_update


class Update:
    """One optimizer step: `begin` before backward, `apply` after it."""

    def __init__(
        self,
        config: Config,
        model: ModelParts,
        optimizer: torch.optim.Optimizer,
        stages: ProcessGroup,
        learning_rate_factor: Callable[[int], float],
    ) -> None:
        """`learning_rate_factor` gives the factor on `optimizer.lr` at a step."""
        self.config, self.model, self.optimizer = config, model, optimizer
        self.learning_rate_factor = learning_rate_factor
        self.learning_rate = 0.0
        self._norm = GlobalNorm(stages)
        self.average = None
        if config.optimizer.average_decay is not None:
            from torchtitan.training.optimizer.average import Average

            self.average = Average(model, config.optimizer.average_decay)
        if config.optimizer.early_step_in_backward:
            from torchtitan.training.optimizer.in_backward import update_in_backward

            update_in_backward(optimizer, self._norm.add, lambda: self.learning_rate)

    def begin(self, step: int) -> None:
        """Set the step's learning rate before backward, because an update in backward needs it."""
        self.learning_rate = self.config.optimizer.lr * self.learning_rate_factor(step)

    def apply(self, count: Tensor | None = None) -> Tensor:
        """Divide the gradients by `count`, clip them and update. Returns their norm before, still on the device."""
        self._norm.add(*self.model.own_gradients())
        gradient_norm = self._norm.total()
        scale, divisor = self.model.loss_scale, count
        if scale is not None:
            divisor = scale.factor if count is None else count * scale.factor
        if divisor is not None:
            gradient_norm = gradient_norm / (divisor := divisor.to(gradient_norm.device))  # which may be the host
        max_norm = self.config.training.max_norm
        apply_update(self.optimizer, self.learning_rate, gradient_norm, max_norm, 1.0 if divisor is None else divisor)
        if scale is not None:
            scale.adapt(gradient_norm)
        if self.average is not None:
            self.average.update()
        if self.model.load is not None:
            self.model.load.after_update(gradient_norm)
        self.after_update()
        return gradient_norm

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Inside, the model has the averaged weights, if `optimizer.average_decay` keeps them."""
        self._swap()
        yield
        self._swap()

    def _swap(self) -> None:
        if self.average is not None:
            self.average.swap()
            self.after_update()

    def after_update(self) -> None:
        """Recompute values that depend on the weights."""
        if self.config.float8 is not None:
            from torchtitan.parallel.float8 import update_float8_scales

            update_float8_scales(self.model.stages.values(), self.config.float8)
