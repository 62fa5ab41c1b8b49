"""Tiny models with random weights, stored as a run's checkpoint."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.tiny_models import LLAMA, SCALED, TINY  # noqa: F401
from tests.tiny_runs import tiny_config
from torchtitan.checkpoint.storage import Storage
from torchtitan.models.decoder.model import Transformer
from torchtitan.models.llama.args import LlamaArgs
from torchtitan.weights.checkpoint import save_checkpoint
from torchtitan.weights.tensors import Weights

VOCAB = 2048  # the tokenizer's of the tests
SHAPES = {flavor: LLAMA.flavors[flavor] for flavor in ("tiny", "tiny-tied", "tiny-scaled")}


def random_weights(args: LlamaArgs) -> dict[str, Tensor]:
    """Larger than a beginning model's, so that its likeliest tokens are far apart."""
    torch.manual_seed(0)
    return {
        name: (1 + 0.1 * torch.randn_like(p)) if p.ndim == 1 else 0.15 * torch.randn_like(p)
        for name, p in Transformer(replace(args, vocab_size=VOCAB)).named_parameters()
    }


def hold(weights: dict[str, Tensor]) -> Weights:
    """Weights that are in memory."""
    outline = {name: tensor.to("meta") for name, tensor in weights.items()}
    return Weights("memory", outline, lambda name, tensor: tensor.copy_(weights[name]))


def store_run(folder: Path, flavor: str = "tiny", weights: dict[str, Tensor] | None = None, **keys: Any) -> Path:
    """A run folder whose checkpoint of step 0 holds them, or random ones."""
    config = tiny_config(folder, model__flavor=flavor, **keys)
    weights = random_weights(LLAMA.flavors[flavor]) if weights is None else weights
    save_checkpoint(hold(weights), Storage(f"{folder}/checkpoint"), config.model_dump(mode="json"), None)
    return folder
