"""Handwritten digits of 8 x 8 points, and a multilayer perceptron that reads them."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from torchtitan.models.spec import ModelSpec


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))


def digits() -> TensorDataset:
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    return TensorDataset(torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(labels))


def accuracy(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return (output.argmax(1) == labels).float().mean()


SPEC = ModelSpec(build=build, data=digits, loss=cross_entropy, metrics={"accuracy": accuracy})
