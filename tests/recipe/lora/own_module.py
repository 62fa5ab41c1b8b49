"""A user's module with layers in a list, which learns two bits of its input."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.utils.data import TensorDataset

from torchtitan.models.spec import ModelSpec


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(8, 16)
        self.blocks = nn.ModuleList([Block() for _ in range(4)])
        self.leave = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.leave(x)


def data(split: str) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(96, 8, generator=generator)
    return TensorDataset(x, (x[:, 0] * x[:, 1] > 0).long() + 2 * (x[:, 2] > 0).long())


def tensor_plan(*_: object) -> dict[str, Any]:
    return {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}


SPEC = ModelSpec(Model, data, nn.functional.cross_entropy, layers="blocks", tensor_plan=tensor_plan)
