"""What all sites of a run must say alike: the model, what it learns, how, and when sites meet.

How a site computes is its own: layout, batch size, types of numbers, and how its optimizer is implemented.
"""

import json
import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from torchtitan.config.schema import Config
from torchtitan.models.families import FAMILIES, FROM_DOWNLOAD, SHAPE_KEYS, find_model

if TYPE_CHECKING:
    from torchtitan.parallel.parts import ModelParts
    from torchtitan.training.run import Run

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


def download(run: "Run", model: "ModelParts", is_new: bool) -> dict[str, str]:
    """Digests of what a site does not take from the anchor, though it decides what the site learns. All ranks call it.

    A site that resumes has frozen weights from its own checkpoint.
    """
    from torchtitan.data.tokenizers.fingerprint import fingerprint
    from torchtitan.weights.base import find_base

    checkpoint, found = run.config.checkpoint, dict[str, str]()
    if run.tokenizer is not None:
        found["tokenizer"] = fingerprint(run.tokenizer)
    if model.reference is not None:
        found["reference"] = model.reference.hash
    if run.config.trains_a_part and is_new:
        loads = checkpoint.enable and (checkpoint.initial_load_path or checkpoint.initial_load_in_hf)
        path = checkpoint.initial_load_path or run.config.model.hf_assets_path
        found["frozen weights"] = find_base(path).fingerprint(shared=True) if loads else "drawn"
    return found


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
