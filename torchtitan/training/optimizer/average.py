"""A moving average of the weights, which often does better than they do. It is saved, validated and exported."""

import torch
from torch import Tensor, nn

from torchtitan.parallel.parts import ModelParts
from torchtitan.training.optimizer.apply import local_part, plain

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

    def _pairs(self) -> list[tuple[Tensor, Tensor]]:
        """This rank's part of each average and of its weight."""
        return [(local_part(state[KEY]), local_part(parameter.detach())) for parameter, state in self.states.items()]

    def begin(self) -> None:
        """Start from the weights as they are."""
        for average, weight in self._pairs():
            average.copy_(weight)

    def update(self) -> None:
        if pairs := self._pairs():
            averages, weights = zip(*pairs, strict=True)
            torch._foreach_lerp_(averages, weights, 1 - self.decay)

    def swap(self) -> None:
        """The model takes the average, and the average its weights; a second time, it is as before."""
        self.model.free_gathered()
        for average, weight in self._pairs():
            kept = weight.clone()
            weight.copy_(average)
            average.copy_(kept)
