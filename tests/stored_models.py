"""Tiny models with random weights, stored as a run's checkpoint."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.tiny_runs import TINY, TINY_TIED, tiny_config
from torchtitan.checkpoint.hf import Weights, save_checkpoint
from torchtitan.checkpoint.storage import Storage
from torchtitan.models.llama.args import FLAVORS, LlamaArgs, RopeScaling
from torchtitan.models.llama.model import Transformer

VOCAB = 2048  # the tokenizer's of the tests
# Within a test's few positions, stretched frequencies differ from plain ones only if the original length is short.
SCALED = RopeScaling(factor=8.0, original_max_seq_len=32)
SHAPES = {"tiny": TINY, "tiny-tied": TINY_TIED, "tiny-scaled": replace(TINY, rope_scaling=SCALED)}


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
    FLAVORS["llama3"]["tiny-scaled"] = SHAPES["tiny-scaled"]
    config = tiny_config(folder, model__flavor=flavor, **keys)
    weights = random_weights(SHAPES[flavor]) if weights is None else weights
    save_checkpoint(hold(weights), Storage(f"{folder}/checkpoint"), config.model_dump(mode="json"), None)
    return folder
