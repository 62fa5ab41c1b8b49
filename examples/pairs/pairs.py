"""An encoder that tells whether two sentences say the same.

The second is the first with a third of its words left out, or another sentence of the same page, cut alike; the pages
are Python's documentation. `QQP` reads Quora's pairs of questions instead, on which DT-FM trained.
"""

import json
import random
import re
import zlib
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from torchtitan.models.spec import ModelSpec

WORDS, LENGTH, DIM, LAYERS = 8192, 48, 64, 2
TEXT = Path(__file__).resolve().parents[2] / "tests" / "assets" / "pydocs"


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.word, self.place, self.part = nn.Embedding(WORDS, DIM), nn.Embedding(LENGTH, DIM), nn.Embedding(2, DIM)
        kind = {"dim_feedforward": 4 * DIM, "dropout": 0.0, "batch_first": True, "norm_first": True}
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(DIM, 4, **kind) for _ in range(LAYERS))
        self.head = nn.Linear(3 * DIM, 2)

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        both = torch.cat([first, second], 1)
        parts = torch.arange(LENGTH, device=first.device) // (LENGTH // 2)
        x = self.word(both) + self.part(parts) + self.place(torch.arange(LENGTH, device=first.device))
        for layer in self.layers:
            x = layer(x)
        a, b = x[:, : LENGTH // 2].mean(1), x[:, LENGTH // 2 :].mean(1)
        return self.head(torch.cat([a, b, a * b], -1))


def encode(sentence: str) -> Tensor:
    words = [1 + zlib.crc32(word.encode()) % (WORDS - 1) for word in re.findall(r"\w+", sentence.lower())]
    return torch.tensor((words + [0] * LENGTH)[: LENGTH // 2])


class Pages(Dataset):
    def __init__(self, split: str) -> None:
        lines = (TEXT / f"{'train' if split == 'train' else 'validation'}.jsonl").read_text().splitlines()
        texts = [re.split(r"(?<=[.:])\s+", json.loads(line)["text"]) for line in lines]
        pages = [[s for s in page if len(s.split()) > 5] for page in texts]
        self.pages = [page for page in pages if len(page) > 1]

    def __len__(self) -> int:
        return 300 * len(self.pages)

    def __getitem__(self, index: int) -> tuple[dict[str, Tensor], int]:
        draw, page = random.Random(index), self.pages[index % len(self.pages)]
        first, other = draw.sample(page, 2)
        same = draw.random() < 0.5
        words = (first if same else other).split()
        kept = sorted(draw.sample(range(len(words)), 2 * len(words) // 3))
        return {"first": encode(first), "second": encode(" ".join(words[i] for i in kept))}, int(same)


class QQP(Dataset):
    def __init__(self, split: str) -> None:
        import datasets

        self.rows = datasets.load_dataset("nyu-mll/glue", "qqp", split=split)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[dict[str, Tensor], int]:
        row = self.rows[index]
        return {"first": encode(row["question1"]), "second": encode(row["question2"])}, row["label"]


def accuracy(output: Tensor, labels: Tensor) -> Tensor:
    return (output.argmax(1) == labels).float().mean()


def spec(data: type[Dataset]) -> ModelSpec:
    return ModelSpec(
        build=Encoder, data=data, loss=F.cross_entropy, metrics={"accuracy": accuracy}, layers="layers", data_workers=0
    )


SPEC, ON_QQP = spec(Pages), spec(QQP)
