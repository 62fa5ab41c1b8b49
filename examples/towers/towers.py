"""Two towers that learn which halves of handwritten digits belong together, with a step of their own."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from torchtitan.models.spec import ModelSpec


def tower() -> nn.Sequential:
    return nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 32))


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.upper, self.lower = tower(), tower()

    def forward(self, upper: Tensor, lower: Tensor) -> tuple[Tensor, Tensor]:
        return F.normalize(self.upper(upper), dim=-1), F.normalize(self.lower(lower), dim=-1)


class Halves(TensorDataset):
    """The upper and the lower half of a digit, and the lower halves of two others to tell it from."""

    def __init__(self) -> None:
        from sklearn.datasets import load_digits

        pixels = torch.tensor(load_digits(return_X_y=True)[0] / 16, dtype=torch.float32)
        super().__init__(pixels[:, :32], pixels[:, 32:], pixels.roll(1, 0)[:, 32:], pixels.roll(7, 0)[:, 32:])

    def __getitem__(self, index: int) -> tuple[tuple[Tensor, Tensor], int]:
        upper, *lower = super().__getitem__(index)
        return (upper.expand(3, -1), torch.stack(lower)), 0


def scores(output: tuple[Tensor, Tensor]) -> Tensor:
    return 10 * (output[0] * output[1]).sum(-1)


def step(model: nn.Module, inputs: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    """Two losses: the right half scores highest, also where a part of the points is missing."""
    upper, lower = inputs
    hidden = upper * (torch.arange(32, device=upper.device) % 4 > 0)
    return F.cross_entropy(scores(model(upper, lower)), target) + F.cross_entropy(scores(model(hidden, lower)), target)


def found(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    return (scores(output).argmax(1) == target).float().mean()


SPEC = ModelSpec(build=Towers, data=Halves, step=step, metrics={"found": found})
