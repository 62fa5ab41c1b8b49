"""Models that know nothing of the recipe, with data of their own: what a user might bring."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from torchtitan.config.schema import Optimizer
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


def with_nan() -> Dataset:
    x, labels = numbers(8), numbers(8).sum(1).sign().long() + 1
    x[[20, 88]] = torch.nan
    return TensorDataset(x, labels)


WITH_NAN = replace(MLP, data=with_nan)
PLAIN_SGD = replace(MLP, optimizer=lambda named, section: torch.optim.SGD([p for _, p in named], lr=section.lr))


def plan(**styles: str) -> Callable[..., dict[str, Any]]:
    """A tensor plan; `__` stands for the dot, `each` for the star."""

    def tensor_plan(*_: object) -> dict[str, Any]:
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

        known = {"columns": ColwiseParallel(), "rows": RowwiseParallel()}
        return {name.replace("__", ".").replace("each", "*"): known[style] for name, style in styles.items()}

    return tensor_plan


class Contained(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        pairs = (nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)) for _ in range(3))
        self.blocks, self.head = nn.Sequential(*pairs), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x))


CONTAINED = ModelSpec(
    build=Contained,
    data=classes,
    loss=F.cross_entropy,
    layers="blocks",
    tensor_plan=plan(blocks__each__0="columns", blocks__each__2="rows"),
)
WITHOUT_LAYERS = replace(CONTAINED, layers=None)
MISSPELT = replace(CONTAINED, tensor_plan=plan(blocks__each__0="columns", blocks__each__O="rows"))
INCOMPLETE = replace(CONTAINED, tensor_plan=plan(blocks__each__0="columns"))
NOTHING_SPLIT = replace(CONTAINED, tensor_plan=lambda *_: {})


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.strength = nn.Linear(8, 8), nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.strength * torch.tanh(self.linear(x))


class Choosing(nn.Module):
    """A mixture as many write it: an expert that nobody chose is left out."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(8, 8), nn.ModuleList(Expert() for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(-1).max(-1)
        out = x.clone()
        for number, expert in enumerate(self.experts):
            (rows,) = torch.where(chosen == number)
            if len(rows):
                out = out.index_add(0, rows, expert(x[rows]) * weights[rows, None])
        return out


CHOOSING = replace(MLP, build=lambda: nn.Sequential(Choosing(), Choosing(), nn.Linear(8, 3)))


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
        self.bias, self.temperature = nn.Parameter(torch.zeros(8)), nn.Parameter(torch.tensor(1.5))

    def forward(self, word: Tensor, *, place: Tensor, gain: float = 2.0) -> dict[str, Tensor]:
        first = x = self.embedding(word)
        for block in self.blocks:
            x = block(x)
        x = self.mix(x * self.scale + gain * first) + self.embedding_of(place) + self.bias
        return {"class": self.temperature * self.heads["a"](x), "value": self.heads["b"](x)[:, 0]}

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


class Sentences(Dataset):
    """Of 1 to 9 words, and each word's successor; 0 is padding."""

    def __len__(self) -> int:
        return 90

    def __getitem__(self, index: int) -> Tensor:
        return 1 + torch.arange(2 + index * 7 % 9) * (1 + index % 3) % 9


def padded(sentences: Sequence[Tensor]) -> dict[str, Tensor]:
    words = nn.utils.rnn.pad_sequence(list(sentences), batch_first=True)
    labels = words[:, 1:].masked_fill(words[:, 1:] == 0, -100)
    return {"words": words[:, :-1], "mask": (words[:, :-1] > 0).long(), "labels": labels}


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        query, key, value = (each[:, None] for each in self.qkv(self.norm(x)).chunk(3, -1))
        return x + self.out(F.scaled_dot_product_attention(query, key, value, mask)[:, 0])


class Reader(nn.Module):
    """Masks and places are made between its modules, in sizes that follow from the batch's."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.blocks = nn.Embedding(10, 16), nn.ModuleList(Attention() for _ in range(5))
        self.out = nn.Linear(16, 10)

    def forward(self, words: Tensor, mask: Tensor) -> Tensor:
        causal = torch.ones(words.shape[1], words.shape[1], device=words.device).tril().bool()
        places = torch.arange(words.shape[1], device=words.device).sin()
        x = self.table(words) + places[None, :, None]
        for block in self.blocks:
            x = block(x, causal & mask.bool()[:, None, None])
        return self.out(x)


SENTENCES = ModelSpec(
    build=Reader,
    data=Sentences,
    collate=padded,  # a dictionary with labels, as collators of transformers give
    length=len,
    loss=lambda output, labels: (
        F.cross_entropy(output.flatten(0, 1), labels.flatten(), reduction="sum"),
        (labels >= 0).sum(),
    ),
    layers="blocks",
)


def time_first(sentences: Sequence[Tensor]) -> tuple[dict[str, Tensor], Tensor]:
    """Labels with the samples in their second dimension."""
    batch = padded(sentences)
    labels = batch.pop("labels")
    return batch, labels.T


TURNED = replace(
    SENTENCES,
    collate=time_first,
    length=None,
    loss=lambda output, labels: (
        F.cross_entropy(output.flatten(0, 1), labels.T.flatten(), reduction="sum"),
        (labels >= 0).sum(),
    ),
)


class Points(Dataset):
    """Sets of 1 to 9 points, each with a label."""

    def __len__(self) -> int:
        return 90

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return numbers(9, 3)[index, : 1 + index * 7 % 9], index % 3


def joined(samples: Sequence[tuple[Tensor, int]]) -> tuple[dict[str, Tensor], Tensor]:
    """The points of all sets in one tensor, as libraries for graphs do."""
    sizes = torch.tensor([len(points) for points, _ in samples])
    inputs = {"points": torch.cat([points for points, _ in samples]), "sizes": sizes}
    return inputs, torch.tensor([label for _, label in samples])


class OfSets(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(3, 16), nn.Linear(16, 3)

    def forward(self, points: Tensor, sizes: Tensor) -> Tensor:
        owners = torch.arange(len(sizes)).repeat_interleave(sizes)
        sums = torch.zeros(len(sizes), 16).index_add(0, owners, torch.tanh(self.embed(points)))
        return self.head(sums / sizes[:, None])  # type: ignore[no-any-return]


SETS = ModelSpec(build=OfSets, data=Points, loss=F.cross_entropy, collate=joined, metrics={"accuracy": accuracy})


def steps_first(samples: Sequence[tuple[Tensor, int]]) -> tuple[dict[str, Tensor], Tensor]:
    """As pad_sequence does unless told otherwise."""
    inputs, labels = joined(samples)
    return {"x": nn.utils.rnn.pad_sequence([x for x, _ in samples]), "sizes": inputs["sizes"]}, labels


class StepsFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru, self.head = nn.GRU(3, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor, sizes: Tensor) -> Tensor:
        return self.head(self.gru(x)[0][sizes - 1, torch.arange(len(sizes))])  # type: ignore[no-any-return]


class Flagged(nn.Module):
    """A plain bool in its inputs decides, which later samples have otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor, flag: bool) -> Tensor:
        return self.b(-self.a(x) if flag else self.a(x))


def with_flag(samples: Sequence[Any]) -> tuple[dict[str, Any], Tensor]:
    (x, _), labels = torch.utils.data.default_collate([((x, 0), y) for x, y in samples])
    return {"x": x, "flag": bool((x[:, None] == numbers(8)[1:13]).all(-1).any())}, labels


class Packed(StepsFirst):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.ModuleList([nn.GRU(3, 8), nn.GRU(8, 8)])  # type: ignore[assignment]

    def forward(self, x: Tensor, sizes: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, sizes, batch_first=True, enforce_sorted=False)
        return self.head(self.gru[1](self.gru[0](packed)[0])[1][0])  # type: ignore[no-any-return, index]


def samples_first(samples: Sequence[tuple[Tensor, int]]) -> tuple[dict[str, Tensor], Tensor]:
    inputs, labels = joined(samples)
    return {"x": nn.utils.rnn.pad_sequence([x for x, _ in samples], True), "sizes": inputs["sizes"]}, labels


STEPS_FIRST = replace(SETS, build=StepsFirst, collate=steps_first)
PACKED = replace(SETS, build=Packed, collate=samples_first)
FLAGGED = ModelSpec(build=Flagged, data=classes, loss=F.cross_entropy, collate=with_flag)


def two_optimizers(named: Sequence[tuple[str, nn.Parameter]], section: Optimizer) -> list[torch.optim.Optimizer]:
    """SGD with a rate of its own for the heads' weights; another kind, whose states exist from the beginning."""
    heads = [p for name, p in named if name.startswith("heads")]
    matrices, vectors = ([p for p in heads if (p.ndim > 1) is whole] for whole in (True, False))
    groups = [{"params": matrices, "lr": 5 * section.lr}, {"params": vectors}]
    rest = [p for name, p in named if not name.startswith("heads")]
    sgd = torch.optim.SGD(groups, lr=section.lr, momentum=0.9, weight_decay=1e-2, nesterov=True)
    return [sgd, torch.optim.Adagrad(rest, lr=2 * section.lr, initial_accumulator_value=0.1)]


OPTIMIZERS = replace(SKIPPING, optimizer=two_optimizers, schedule=lambda step, steps: 0.5 ** (step / steps))


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


def compared(model: nn.Module, inputs: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    """Each left part of a batch is to be likest its own right part."""
    left, right = model(*inputs)
    return F.cross_entropy(left @ right.T, torch.arange(len(left)))


CLIP_LIKE = replace(TOWERS, step=compared)
DRAWN_AT_IMPORT = replace(MLP, data=TensorDataset(torch.rand(SAMPLES, 8) + time.time() % 1, numbers(3).argmax(1)))


class WithPlaces(nn.Module):
    """Its buffer stays in float32, and meets the next weight in the same unit of FSDP."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.register_buffer("places", torch.linspace(-1, 1, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.second(self.first(x) + self.places)))  # type: ignore[no-any-return]


PLACES = ModelSpec(build=WithPlaces, data=classes, loss=F.cross_entropy)


def confusion(output: Tensor, labels: Tensor) -> Tensor:
    return F.one_hot(labels * 3 + output.argmax(-1), 9).sum(0).view(3, 3)


TURNING = replace(
    MLP,
    metrics_of_all={"confusion": confusion, "spread": lambda output, _: output.std()},
    schedule=lambda step, _: 1.0 if step <= 4 else -1.0,  # from then on, the loss rises
)


class Gan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
        self.discriminator = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, noise: Tensor) -> Tensor:
        return self.generator(noise)  # type: ignore[no-any-return]


def adversarial(model: nn.Module, noise: Tensor, real: Tensor) -> Tensor:
    """Calls parts of the model, some of which are units of FSDP."""
    fake = model.generator(noise)
    of_real, of_fake = model.discriminator(real), model.discriminator(fake)
    if fake.requires_grad:
        factor = -torch.exp(-of_fake.detach())  # of softplus(-score), the generator's loss, to softplus(score)
        fake.register_hook(lambda gradient: gradient * factor)
    return (F.softplus(-of_real) + F.softplus(of_fake)).mean()


def both_rates(named: Sequence[tuple[str, nn.Parameter]], section: Optimizer) -> list[torch.optim.Optimizer]:
    sides = {side: [p for name, p in named if name.startswith(side)] for side in ("generator", "discriminator")}
    return [torch.optim.Adam(sides["generator"], section.lr), torch.optim.Adam(sides["discriminator"], section.lr / 2)]


GAN = ModelSpec(
    build=Gan,
    data=lambda: TensorDataset(numbers(8), 2 + numbers(8, seed=1)),
    step=adversarial,
    optimizer=both_rates,
    layers="discriminator",
)


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
        y = self.a(x)
        return self.b(y if y.sum() > 0 else -y)


class BySize(Branching):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x) if len(x) < 4 else x)


BY_SIZE = ModelSpec(build=BySize, data=classes, loss=F.cross_entropy)
BRANCHING = ModelSpec(build=Branching, data=classes, loss=F.cross_entropy)


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self) -> Tensor:
        self.count += 1
        return self.count.clone()


class FrozenNorm(nn.BatchNorm1d):
    """Stays in evaluation mode, so that a batch may be divided."""

    def train(self, mode: bool = True) -> "FrozenNorm":
        return super().train(False)


class Keeper(nn.Module):
    """State of every kind: a count with two names, norms, an average of weights, and a buffer that no file holds."""

    def __init__(self, norm: type[nn.BatchNorm1d], scale: Tensor, dropout: float) -> None:
        super().__init__()
        self.linear = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))
        self.norm, self.dropout, self.out = norm(8), nn.Dropout(dropout), nn.Linear(8, 8)
        self.norm.running_mean.normal_()
        self.first, self.second = Counter(), Counter()
        self.second.count = self.first.count
        self.register_buffer("scale", scale)
        self.register_buffer("average", self.out.weight.detach().clone())
        self.register_buffer("decay", torch.ones(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.average.lerp_(self.out.weight, 0.1)
            self.decay.mul_(0.9)
        y = self.dropout(self.norm(torch.relu(self.linear(x)))) / self.first()
        return x + self.scale * self.out(y) * self.decay.clone() + y @ self.average.clone() / self.second()


class State(nn.Module):
    """Two keepers that share a constant buffer, and a count of its own after them."""

    def __init__(self, norm: type[nn.BatchNorm1d], dropout: float = 0.2) -> None:
        super().__init__()
        scale = torch.linspace(0.5, 1.5, 8)
        self.blocks, self.head = nn.ModuleList(Keeper(norm, scale, dropout) for _ in range(2)), nn.Linear(8, 3)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x) * (1 + 0.1 * self.calls.add_(1).clone())


def keeping_state(norm: type[nn.BatchNorm1d], dropout: float = 0.2) -> ModelSpec:
    return ModelSpec(build=lambda: State(norm, dropout), data=classes, loss=F.cross_entropy, layers="blocks")


class CountingTogether(State):
    """Both blocks count in one buffer, which two stages would change apart."""

    def __init__(self) -> None:
        super().__init__(FrozenNorm)
        self.blocks[1].first.count = self.blocks[1].second.count = self.blocks[0].first.count


COUNTING_TOGETHER = ModelSpec(build=CountingTogether, data=classes, loss=F.cross_entropy, layers="blocks")
STATE, FROZEN_STATE = keeping_state(nn.BatchNorm1d), keeping_state(FrozenNorm)
STATE_WITHOUT_DRAWS, FROZEN_STATE_WITHOUT_DRAWS = keeping_state(nn.BatchNorm1d, 0.0), keeping_state(FrozenNorm, 0.0)
