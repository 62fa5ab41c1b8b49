"""ViT of transformers, twice: it learns to name the digits 0 to 4, and then all ten from few that have a label.

`FIRST` trains it. `SPEC` has another head that learns ten times as fast, and train.toml starts it from those weights.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset
from transformers import ViTConfig, ViTForImageClassification

from torchtitan.config.schema import Optimizer
from torchtitan.models.spec import ModelSpec

LABELLED = 50


def vit(num_labels: int) -> nn.Module:
    size = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 128}
    config = ViTConfig(image_size=8, patch_size=2, num_channels=1, num_labels=num_labels, **size)
    return ViTForImageClassification(config)


class Digits(TensorDataset):
    """Images of the digits below `end`; every fifth is held out."""

    def __init__(self, split: str, end: int, most: int | None = None) -> None:
        from sklearn.datasets import load_digits

        pixels, labels = map(torch.tensor, load_digits(return_X_y=True))
        images, labels = (pixels[labels < end] / 8 - 1).float().view(-1, 1, 8, 8), labels[labels < end]
        is_held_out = torch.arange(len(labels)) % 5 == 0
        here = is_held_out if split == "validation" else ~is_held_out
        super().__init__(images[here][:most], labels[here][:most])

    def __getitem__(self, index: int) -> tuple[dict[str, Tensor], Tensor]:
        image, label = super().__getitem__(index)
        return {"pixel_values": image}, label


def few(split: str) -> Digits:
    return Digits(split, 10, LABELLED if split == "train" else None)


def two_rates(named: Sequence[tuple[str, nn.Parameter]], section: Optimizer) -> torch.optim.Optimizer:
    head = [p for name, p in named if name.startswith("classifier")]
    rest = [p for name, p in named if not name.startswith("classifier")]
    return torch.optim.AdamW([{"params": rest}, {"params": head, "lr": 10 * section.lr}], lr=section.lr)


def loss(output, label: Tensor) -> Tensor:
    return F.cross_entropy(output.logits, label)


def accuracy(output, label: Tensor) -> Tensor:
    return (output.logits.argmax(1) == label).float().mean()


def confusion(output, label: Tensor) -> Tensor:
    count = output.logits.shape[1]
    return F.one_hot(count * label + output.logits.argmax(1), count * count).sum(0).view(count, count)


COMMON = {"loss": loss, "metrics": {"accuracy": accuracy}, "metrics_of_all": {"confusion": confusion}}
FIRST = ModelSpec(build=lambda: vit(5), data=lambda split: Digits(split, 5), layers="vit.layers", **COMMON)
SPEC = ModelSpec(build=lambda: vit(10), data=few, layers="vit.layers", optimizer=two_rates, **COMMON)
