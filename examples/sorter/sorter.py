"""A small GPT that learns to sort: it reads six numbers from 0 to 9, then writes them in order."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from torchtitan.models.spec import ModelSpec

LENGTH, NUMBERS, DIM, HEADS, LAYERS = 6, 10, 64, 4, 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(DIM) for _ in range(2))
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.mlp = nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


class Sorter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(NUMBERS, DIM)
        self.place = nn.Parameter(0.02 * torch.randn(2 * LENGTH - 1, DIM))
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.output = nn.LayerNorm(DIM), nn.Linear(DIM, NUMBERS)

    def forward(self, numbers: Tensor) -> Tensor:
        x = self.embedding(numbers) + self.place
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))


class Lists(Dataset):
    """Lists of numbers, each drawn from its own number; those for validation are others."""

    def __init__(self, split: str) -> None:
        self.begin, self.size = (0, 100_000) if split == "train" else (1_000_000, 1_000)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(self.begin + index)
        numbers = torch.randint(NUMBERS, (LENGTH,), generator=generator)
        both = torch.cat([numbers, numbers.sort().values])
        target = both[1:].clone()
        target[: LENGTH - 1] = -100  # what follows within the input cannot be known
        return both[:-1], target


def loss(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    return F.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum"), (target >= 0).sum()


def sorted_right(output: Tensor, target: Tensor) -> Tensor:
    return ((output.argmax(-1) == target) | (target < 0)).all(1).float().mean()


def tensor_plan(*_: object) -> dict:
    """Ranks share each block's MLP; the rest of the model is on all of them."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    return {"layers.*.mlp.0": ColwiseParallel(), "layers.*.mlp.2": RowwiseParallel()}


SPEC = ModelSpec(
    build=Sorter, data=Lists, loss=loss, metrics={"sorted": sorted_right}, layers="layers", tensor_plan=tensor_plan
)
