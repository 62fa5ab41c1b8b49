"""A model whose step takes time and hardly any processor, as on an accelerator, so that many runs share two cores.

With POISON in the environment, a rank whose file of this name appears computes a loss that is not a number, once.
"""

import os
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset, TensorDataset

from torchtitan.models.spec import ModelSpec

STEP_SECONDS = float(os.environ.get("STEP_SECONDS", "0.1"))
WIDTH = int(os.environ.get("WIDTH", "256"))
LAYERS = int(os.environ.get("LAYERS", "4"))


def build() -> nn.Module:
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 3))


def samples() -> Dataset[tuple[Tensor, ...]]:
    inputs = torch.randn(5_000_000 // WIDTH, WIDTH, generator=torch.Generator().manual_seed(0))
    noise = torch.randn(len(inputs), generator=torch.Generator().manual_seed(1))
    return TensorDataset(inputs, (inputs[:, :8].sum(1) + 3 * noise).sign().long() + 1)


def step(model: nn.Module, inputs: Tensor, target: Tensor) -> Tensor:
    time.sleep(STEP_SECONDS)
    loss = cross_entropy(model(inputs), target)
    poison = Path(os.environ.get("POISON", "none"))
    if poison.exists():
        poison.unlink(missing_ok=True)
        loss = loss * float("nan")
    return loss


SPEC = ModelSpec(build=build, data=samples, step=step)
