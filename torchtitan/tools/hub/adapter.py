"""Writes a run's adapter, or its base with the adapter merged in, and proves what was written before it says so.

Every tensor is read back and compared with what the checkpoint holds, whose norms the run noted while it held them.
Then the model computes some tokens both ways, part by part, so that no more than one part is in memory.
"""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from torchtitan.config.schema import Config, Training
from torchtitan.lora.layers import attach
from torchtitan.lora.names import is_adapter
from torchtitan.models.spec import Blueprint
from torchtitan.refusal import Refusal
from torchtitan.training.parallelize import keep_parts
from torchtitan.weights.adapted import StoredAdapter
from torchtitan.weights.peft import key_of, open_adapter, write_adapter
from torchtitan.weights.stored import StoredModel, open_model, write_hf
from torchtitan.weights.tensors import Weights

_PROMPTS, _TOKENS = 4, 16
EXACT, _ROUNDED = 1e-4, 5e-2  # how far logits may be apart, of the largest: in float32, and with rounded weights


def export_adapter(source: StoredModel, target: str, dtype: torch.dtype | None) -> str:
    """Write a folder for peft. Returns what was proved."""
    adapter, naming = _checked(source), source.blueprint.spec.hugging_face
    to_name = naming().to_name if naming else None
    write_adapter(adapter, target, to_name, dtype)
    read = open_adapter(target, adapter.lora)
    back = read.renamed({name: key_of(name, to_name) for name in adapter.weights.outline})
    compare(target, back, adapter.weights.read, dtype)
    found, changed = _apart(source, source.weights, back)
    return _judged(target, len(back.outline), found, changed, dtype)


def export_merged(source: StoredModel, target: str, assets: Path, dtype: torch.dtype | None, shard_bytes: int) -> str:
    """Write a folder for transformers. Returns what was proved."""
    adapter = _checked(source)
    write_hf(source, target, assets, dtype, shard_bytes)
    written = open_model(target, source.family).weights
    compare(target, written, source.weights.read, dtype)
    found, changed = _apart(source, written, adapter.weights)
    return _judged(target, len(written.outline), found, changed, next(iter(written.outline.values())).dtype)


def _checked(source: StoredModel) -> StoredAdapter:
    assert source.adapter is not None
    source.adapter.check()
    return source.adapter


def compare(target: str, written: Weights, held: Callable[..., Tensor], dtype: torch.dtype | None) -> None:
    for name, like in written.outline.items():
        if not torch.equal(written.read(name), held(name, dtype or like.dtype)):
            raise Refusal(f"{target} is not what the checkpoint holds: {name} differs; write it again, elsewhere")


def _judged(target: str, count: int, found: float, changed: float, dtype: torch.dtype | None) -> str:
    limit = EXACT if dtype in (None, torch.float32) else _ROUNDED
    if not found <= limit:
        raise Refusal(
            f"{target}: merged and unmerged weights give logits that are {found:.1e} apart, of the largest; at most "
            f"{limit:.0e} is rounding. Write it with --dtype float32, or report this"
        )
    return (
        f"read back: all {count} tensors are the checkpoint's; of {_PROMPTS} prompts, merged and unmerged logits are "
        f"{found:.1e} apart, and the adapter changes them by {changed:.1e} (of the largest)"
    )


@torch.no_grad()
def _apart(source: StoredModel, merged: Weights, adapter: Weights) -> tuple[float, float]:
    """How far the merged model's logits are from those of base and adapter, and from those of the base alone."""
    assert source.adapter is not None
    blueprint, base = source.blueprint, source.adapter.base
    generator = torch.Generator().manual_seed(0)
    rows = blueprint.shape.vocab_size
    tokens = torch.randint(rows, (_PROMPTS, min(_TOKENS, blueprint.shape.max_seq_len)), generator=generator)
    config = Config(lora=source.adapter.lora, training=Training(mixed_precision_param="float32"))

    def read(name: str, tensor: Tensor) -> None:
        (adapter if is_adapter(name) else base).fill(blueprint.leading_name(name), tensor)

    ways = [
        _forward(blueprint, tokens, None, lambda name, tensor: merged.fill(blueprint.leading_name(name), tensor)),
        _forward(blueprint, tokens, config, read),
        _forward(blueprint, tokens, None, lambda name, tensor: base.fill(blueprint.leading_name(name), tensor)),
    ]
    of_merged, unmerged, plain = ways
    largest = float(unmerged.abs().max())
    return float((of_merged - unmerged).abs().max()) / largest, float((plain - unmerged).abs().max()) / largest


def _forward(
    blueprint: Blueprint, tokens: Tensor, config: Config | None, fill: Callable[[str, Tensor], None]
) -> Tensor:
    """Logits in float32, as a pipeline computes them whose every stage is one part."""
    value, positions = tokens, torch.arange(tokens.shape[1]).expand(len(tokens), -1)
    parts = blueprint.parts()
    for part in parts:
        with torch.device("meta"):
            stage = blueprint.spec.build(blueprint.shape)
        if config is not None:
            attach(stage, config, blueprint.layers)
        keep_parts(stage, parts, [part])
        stage.to_empty(device="cpu").eval()
        for name, parameter in stage.named_parameters():
            fill(name, parameter)
        value = stage(value, positions=positions)
    return value
