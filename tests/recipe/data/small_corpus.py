"""Shared by the data tests: a byte tokenizer, small files, and loaders that read them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from torchtitan.config.schema import DataSource
from torchtitan.data.batch import OwnSlots, Shape
from torchtitan.data.cursor import Order
from torchtitan.data.loader import Loader, open_sources
from torchtitan.data.tokenizers.tokenizer import Tokenizer

BOS, EOS = 256, 257


class ByteTokenizer:
    """Each byte is one token."""

    vocab_size, bos_id, eos_id, file_sha256 = 258, BOS, EOS, ""

    def encode(self, text: str, bos: bool, eos: bool) -> list[int]:
        return [BOS] * bos + list(text.encode()) + [EOS] * eos

    def encode_batch(self, texts: list[str], bos: bool, eos: bool) -> list[list[int]]:
        return [self.encode(text, bos, eos) for text in texts]

    def decode(self, ids: Any) -> str:
        return bytes(i for i in ids if i < 256).decode(errors="replace")


def make_texts(count: int, name: str = "d") -> list[str]:
    """Texts that all differ, of very different lengths."""
    return [f"{name}{i}:" + "abcdefgh"[i % 8] * (i * 37 % 101) for i in range(count)]


def write_jsonl(path: Path, texts: list[str]) -> str:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


def small_loader(*paths: str, **options: Any) -> Loader:
    weights = options.pop("weights", [1.0] * len(paths))
    settings: dict[str, Any] = {
        "seq_len": 32,
        "global_batch_size": 8,
        "dp_rank": 0,
        "dp_size": 1,
        "seed": 7,
        "epochs": 1,
        "shuffle": True,
        "block_causal": False,
    }
    sources = [DataSource(dataset="x", dataset_path=p, weight=w) for p, w in zip(paths, weights, strict=True)]
    settings |= options
    settings.setdefault("num_streams", settings["global_batch_size"])
    return loader_of(sources, ByteTokenizer(), **settings)


def loader_of(
    given: list[DataSource],
    tokenizer: Tokenizer,
    *,
    seq_len: int,
    global_batch_size: int,
    num_streams: int,
    seed: int,
    epochs: int,
    shuffle: bool,
    block_causal: bool,
    dp_rank: int = 0,
    dp_size: int = 1,
    any_says_so: Callable[[bool], bool] | None = None,
) -> Loader:
    layout, pads = OwnSlots(global_batch_size, num_streams, dp_rank, dp_size), any_says_so is not None
    sources = open_sources(given, tokenizer, layout, epochs, divided=False, pads=pads)
    shape = Shape(seq_len, tokenizer.eos_id, block_causal, False, pads)
    return Loader(sources, tokenizer, layout, shape, Order(num_streams, seed, shuffle), any_says_so)


def take(loader: Loader, count: int = 10**6) -> list[torch.Tensor]:
    """The next batches as tensors of [B, S + 1]: the inputs and the last label."""
    batches = []
    while len(batches) < count and (batch := loader.next()) is not None:
        batches.append(torch.cat([batch.inputs, batch.labels[:, -1:]], dim=1))
    return batches


def equal(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return len(left) == len(right) and all(torch.equal(a, b) for a, b in zip(left, right, strict=True))
