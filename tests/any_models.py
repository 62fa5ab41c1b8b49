"""Models that know nothing of the recipe, with data of their own: what a user might bring."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from torchtitan.models.spec import ModelSpec

SAMPLES = 96


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(SAMPLES, *shape, generator=torch.Generator().manual_seed(seed))


def mlp() -> nn.Module:
    return nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(8, 8), nn.Tanh())), nn.Linear(8, 3))


def classes() -> Dataset:
    return TensorDataset(numbers(8), numbers(8).sum(1).sign().long() + 1)


def accuracy(output: Tensor, labels: Tensor) -> Tensor:
    return (output.argmax(-1) == labels).float().mean()


MLP = ModelSpec(build=mlp, data=classes, loss=F.cross_entropy, metrics={"accuracy": accuracy})


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down(torch.relu(self.up(self.norm(x))))
        return x


class Skipping(nn.Module):
    """Two inputs by name, one used late; a value that skips blocks; a buffer; a dictionary as output."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.mix, self.heads = nn.Linear(8, 8), nn.ModuleDict({"a": nn.Linear(8, 3), "b": nn.Linear(8, 1)})
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 8))
        self.bias = nn.Parameter(torch.zeros(8))

    def forward(self, word: Tensor, *, place: Tensor, gain: float = 2.0) -> dict[str, Tensor]:
        first = x = self.embedding(word)
        for block in self.blocks:
            x = block(x)
        x = self.mix(x * self.scale + gain * first) + self.embedding_of(place) + self.bias
        return {"class": self.heads["a"](x), "value": self.heads["b"](x)[:, 0]}

    def embedding_of(self, place: Tensor) -> Tensor:
        return place[:, None].sin() * self.scale


class Words(Dataset):
    def __init__(self, split: str) -> None:
        self.words = torch.arange(SAMPLES) * 7 % 10
        self.begin = 0 if split == "train" else 64

    def __len__(self) -> int:
        return 64 if self.begin == 0 else 21  # not a whole number of batches

    def __getitem__(self, index: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        word = self.words[self.begin + index]
        return {"word": word, "place": torch.tensor(0.1 * index)}, {"class": word % 3, "value": word / 10}


def two_losses(output: dict[str, Tensor], target: dict[str, Tensor]) -> tuple[Tensor, int]:
    losses = F.cross_entropy(output["class"], target["class"], reduction="sum")
    losses = losses + F.mse_loss(output["value"], target["value"], reduction="sum")
    return losses, len(target["class"])


SKIPPING = ModelSpec(
    build=Skipping,
    data=Words,
    loss=two_losses,
    metrics={"near": lambda output, target: ((output["value"] - target["value"]).abs() < 0.3).float().mean()},
    layers="blocks",
)


class Towers(nn.Module):
    """Two inputs by position, a tuple as output, and one weight under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.out = nn.Linear(4, 8), nn.Linear(6, 8), nn.Linear(8, 8)
        self.again = nn.Linear(8, 8, bias=False)
        self.again.weight = self.out.weight

    def forward(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        return self.again(self.out(torch.tanh(self.left(left)))), self.again(torch.tanh(self.right(right)))


class Pairs(IterableDataset):
    def __iter__(self):  # type: ignore[no-untyped-def]
        left, right = numbers(4), numbers(6, seed=1)
        for i in range(SAMPLES):
            yield (left[i], right[i]), left[i].sum()


def likeness(model: nn.Module, inputs: tuple[Tensor, Tensor], target: Tensor) -> tuple[Tensor, Tensor]:
    """A step of its own, which leaves samples out: their number differs between batches and ranks."""
    left, right = model(*inputs)
    kept = (target > -1).float()
    return ((left - right).square().mean(1) * kept).sum(), kept.sum()


TOWERS = ModelSpec(build=Towers, data=Pairs, step=likeness)


class WithDropout(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 3))


DROPOUT = ModelSpec(build=WithDropout, data=classes, loss=nn.CrossEntropyLoss())
BATCH_NORM = ModelSpec(
    build=lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)), data=classes, loss=F.cross_entropy
)


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x) if x.sum() > 0 else x)


BRANCHING = ModelSpec(build=Branching, data=classes, loss=F.cross_entropy)
