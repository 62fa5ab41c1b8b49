"""Adapters in the files of `peft`: adapter_config.json, and adapter_model.safetensors under the base's names there."""

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from torchtitan.config.schema import Lora
from torchtitan.data.tokenizers.files import load_json, write_json
from torchtitan.lora.names import is_adapter, layer_of
from torchtitan.observe.log import logger
from torchtitan.parallel.parts import ModelParts
from torchtitan.refusal import Refusal
from torchtitan.weights.adapted import StoredAdapter
from torchtitan.weights.base import Base
from torchtitan.weights.files import open_files
from torchtitan.weights.hugging_face import write_shard
from torchtitan.weights.targets import make_empty, refuse_existing
from torchtitan.weights.tensors import Weights

CONFIG, FILE = "adapter_config.json", "adapter_model.safetensors"
ToName = Callable[[str], str]
# What an adapter must not have, for this recipe has it not: the values with which a key does nothing.
_OFF: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "use_dora": (False,),
    "fan_in_fan_out": (False,),
    "modules_to_save": (None, []),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "lora_bias": (False,),
    "target_parameters": (None, []),
    "trainable_token_indices": (None,),
}


def start_on(model: ModelParts, base: Base, to_name: ToName | None = None) -> None:
    """Note the base that the model was filled with, and where its adapter begins; called by all ranks."""
    adapter = model.adapter
    assert adapter is not None
    adapter.base, adapter.hash = base.where, base.fingerprint(shared=True)
    logger.info(f"loaded the base {base.where} (SHA-256 {adapter.hash[:12]})")
    if (folder := adapter.lora.initial_load_path) is not None:
        adapter.start = partial(_fill, model, folder, adapter.lora, to_name)


def _fill(model: ModelParts, folder: str, lora: Lora, to_name: ToName | None) -> None:
    source = open_adapter(folder, lora)
    parameters = {name: p for name, p in model.saved_parameters().items() if is_adapter(name)}
    keys = {name: key_of(name, to_name) for name in parameters}
    whole = model.adapter.everyones(keys.values()) if model.adapter else set()
    faults = [f"missing: {key}" for key in sorted(whole - source.outline.keys())]
    faults += [f"of no target: {key}" for key in sorted(source.outline.keys() - whole)]
    faults += [
        f"wrong shape: {keys[name]} is {tuple(source.outline[keys[name]].shape)}, here {tuple(parameter.shape)}"
        for name, parameter in parameters.items()
        if keys[name] in source.outline and source.outline[keys[name]].shape != parameter.shape
    ]
    if faults:
        more = [f"and {len(faults) - 10} more"] if len(faults) > 10 else []
        raise Refusal("\n  ".join([f"{folder} does not fit this run's lora.targets:", *faults[:10], *more]))
    for name, parameter in parameters.items():
        source.fill(keys[name], parameter)
    logger.info(f"loaded the adapter {folder}")


def open_adapter(folder: str, lora: Lora) -> Weights:
    """The adapter in a folder of peft's, if it has the scaling of this run."""
    place = Path(folder)
    if not (place / CONFIG).is_file():
        raise Refusal(f'lora.initial_load_path = "{folder}" has no {CONFIG}; name the folder of an adapter')
    config = load_json(place / CONFIG)
    wrong = [f"{key} = {config[key]!r}" for key, off in _OFF.items() if key in config and config[key] not in off]
    if wrong:
        raise Refusal(f"{folder} is an adapter that this recipe cannot train: {', '.join(wrong)}; use a plain one")
    theirs = {"rank": config.get("r"), "alpha": config.get("lora_alpha"), "rslora": config.get("use_rslora", False)}
    if differing := [f"lora.{key} = {value}" for key, value in theirs.items() if value != getattr(lora, key)]:
        raise Refusal(f"{folder} was trained with other keys; set {', '.join(differing)}")
    return open_files([place / FILE if (place / FILE).is_file() else place / "adapter_model.bin"])


def key_of(name: str, to_name: ToName | None) -> str:
    """`layers.0.attention.wq.lora_A` -> `base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight`."""
    layer, part = layer_of(name), name.rpartition(".")[2]
    return f"base_model.model.{_renamed(layer, to_name)}.{part}.weight"


def _renamed(layer: str, to_name: ToName | None) -> str:
    return to_name(f"{layer}.weight").removesuffix(".weight") if to_name else layer


def write_adapter(
    adapter: StoredAdapter, folder: str, to_name: ToName | None, dtype: torch.dtype | None = None, causal: bool = True
) -> None:
    """Write a folder that peft loads on the base. The last step is the rename to its name."""
    target = refuse_existing(folder)
    writing = target.with_name(f"{target.name}.writing")
    mark = make_empty(writing)
    weights = adapter.weights.renamed({key_of(name, to_name): name for name in adapter.weights.outline})
    outline = {name: like.to(dtype or like.dtype) for name, like in weights.outline.items()}
    write_shard(writing / FILE, outline, weights)
    chosen = [_renamed(layer, to_name) for layer in adapter.layers]
    known = [_renamed(layer_of(name), to_name) for name in adapter.base.outline if name.endswith(".weight")]
    lora = adapter.lora
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM" if causal else None,
        "base_model_name_or_path": adapter.where,
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if lora.alpha.is_integer() else lora.alpha,
        "lora_dropout": lora.dropout,
        "use_rslora": lora.rslora,
        "target_modules": _shortened(chosen, known),
        "bias": "none",
        "fan_in_fan_out": False,
        "use_dora": False,
        "modules_to_save": None,
        "init_lora_weights": True,
        "inference_mode": True,
    }
    write_json(writing / CONFIG, config)
    mark.unlink()
    writing.rename(target)


def _shortened(chosen: Iterable[str], known: Iterable[str]) -> list[str]:
    """The last words of names, as `q_proj`, which is what vLLM knows; whole names, where these would take in others."""
    chosen, known = set(chosen), list(known)
    ends = {name.rpartition(".")[2] for name in chosen}
    taken = {name for name in known if name.rpartition(".")[2] in ends}
    return sorted(ends if taken == chosen else chosen)
