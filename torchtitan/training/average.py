"""A moving average of the weights, which often does better than they do. It is saved, validated and exported."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from torchtitan.parallel.fsdp import free_gathered
from torchtitan.parallel.parts import ModelParts
from torchtitan.training.checkpoints.state import plain
from torchtitan.training.optimizer.update import local_part

KEY = "average"


class Average:
    """Of each weight that has a gradient, `decay` of its average so far and the rest of the weight."""

    def __init__(self, model: ModelParts, decay: float) -> None:
        self.model, self.decay = model, decay
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.states: dict[nn.Parameter, dict[str, Tensor]] = {p: {KEY: plain(p.detach()).clone()} for p in trained}

    def tensors(self) -> dict[str, Tensor]:
        """Under the names of a checkpoint."""
        named = self.model.saved_parameters().items()
        return {f"{KEY}.{name}": self.states[p][KEY] for name, p in named if p in self.states}

    def _each(self, change: Callable[[Tensor, Tensor], object]) -> None:
        with torch.no_grad():
            for parameter, state in self.states.items():
                change(local_part(state[KEY]), local_part(parameter))

    def begin(self) -> None:
        """Start from the weights as they are."""
        self._each(lambda average, weight: average.copy_(weight))

    def update(self) -> None:
        self._each(lambda average, weight: average.lerp_(weight, 1 - self.decay))

    def swap(self) -> None:
        """The model takes the average, and the average its weights; a second time, it is as before."""

        def exchange(average: Tensor, weight: Tensor) -> None:
            kept = weight.clone()
            weight.copy_(average)
            average.copy_(kept)

        free_gathered(self.model.stages.values())
        self._each(exchange)
