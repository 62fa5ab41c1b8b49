"""What all sites of a run must say alike: the model, what it learns, how, and when sites meet.

How a site computes is its own: layout, batch size, types of numbers, and how its optimizer is implemented.
"""

import json
import math
from dataclasses import asdict
from typing import Any

from pydantic import BaseModel

from torchtitan.config.schema import Config
from torchtitan.models.families import FAMILIES, FROM_DOWNLOAD, SHAPE_KEYS, find_model

PROTOCOL = 2
TOTAL_STEPS = "lr_scheduler.total_steps (without it training.steps)"
MAY_CHANGE = ("swarm.quorum", TOTAL_STEPS)  # between two starts of a syncer: a site is lost, or the run goes on longer
_KEYS = (
    *("swarm.every", "swarm.every_seconds", "swarm.fragments", "swarm.codec", "swarm.quorum", "swarm.sites"),
    *("swarm.method", "swarm.outer_lr", "swarm.outer_momentum"),
    *("model.name", "model.flavor", "model.attn_mask_type"),
    *("training.seq_len", "training.dataset", "training.shuffle", "training.max_norm", "training.preference_beta"),
    *("optimizer.name", "optimizer.lr", "optimizer.beta1", "optimizer.beta2", "optimizer.eps"),
    *("optimizer.weight_decay", "optimizer.weight_decay_norms_and_biases"),
    *("lr_scheduler.warmup_steps", "lr_scheduler.decay_ratio", "lr_scheduler.decay_type", "lr_scheduler.min_lr_factor"),
)


def shared(config: Config) -> dict[str, Any]:
    values = config.model_dump(mode="json")
    said = {key: values[key.partition(".")[0]][key.partition(".")[2]] for key in _KEYS}
    said |= {f"model.{key}": value for key, value in _shape(config).items()}
    said[TOTAL_STEPS] = config.lr_scheduler.total_steps or config.training.steps
    return {"protocol": PROTOCOL} | {key: _plain(value) for key, value in said.items()}


def _shape(config: Config) -> dict[str, Any]:
    """A syncer has neither a user's file nor a download, so of their models it knows what [model] says."""
    model = config.model
    if model.name in FAMILIES and model.flavor != FROM_DOWNLOAD:
        return asdict(find_model(model).shape)
    return {key: getattr(model, key) for key in SHAPE_KEYS}


def _plain(value: Any) -> Any:
    """As a message can hold it: infinity and whole sections as text."""
    if isinstance(value, BaseModel):
        return json.dumps(value.model_dump(), sort_keys=True)
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
