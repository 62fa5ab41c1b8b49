"""A small ResNet with GroupNorm on handwritten digits, enlarged to 16 x 16 points."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from torchtitan.models.spec import ModelSpec


def convolution(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    conv = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
    return nn.Sequential(conv, nn.GroupNorm(8, outputs))  # BatchNorm would depend on how a batch is divided


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first, self.second = convolution(inputs, outputs, stride), convolution(outputs, outputs)
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.shortcut(x) + self.second(torch.relu(self.first(x))))


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = convolution(1, 16)
        self.blocks = nn.Sequential(Block(16, 16, 1), Block(16, 32, 2), Block(32, 32, 1), Block(32, 64, 2))
        self.head = nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.blocks(torch.relu(self.stem(images))).mean((2, 3)))


def images() -> TensorDataset:
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    small = torch.tensor(pixels / 16, dtype=torch.float32).view(-1, 1, 8, 8)
    return TensorDataset(F.interpolate(small, scale_factor=2, mode="bilinear"), torch.tensor(labels))


def accuracy(output: Tensor, labels: Tensor) -> Tensor:
    return (output.argmax(1) == labels).float().mean()


SPEC = ModelSpec(build=ResNet, data=images, loss=F.cross_entropy, metrics={"accuracy": accuracy}, layers="blocks")
