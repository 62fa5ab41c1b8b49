"""The adapter of a user's module: merged into the weights that `export` takes away, and as a folder of peft's."""

from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from torchtitan.checkpoint.storage import Manifest
from torchtitan.config.schema import Config, Lora, Training
from torchtitan.lora.names import is_adapter
from torchtitan.models.spec import ModelSpec
from torchtitan.own_model.build import build_part
from torchtitan.own_model.derive import call_with
from torchtitan.own_model.weights import open_for
from torchtitan.refusal import Refusal
from torchtitan.tools.hub.adapter import EXACT, compare
from torchtitan.weights.adapted import StoredAdapter, open_base
from torchtitan.weights.base import Base, find_base
from torchtitan.weights.peft import key_of, open_adapter, write_adapter
from torchtitan.weights.tensors import Weights


def find(saved: Weights, manifest: Manifest, model: nn.Module) -> StoredAdapter:
    """The adapter that a checkpoint holds, on the base that it names, whose names are the module's."""

    def open_named(path: str) -> tuple[Base, Weights]:
        return find_base(path), open_for(path, model)

    said = manifest.run["lora"]
    base = open_base(said, (manifest.config["checkpoint"]["initial_load_path"],), open_named)
    adapter = StoredAdapter(saved, Lora.model_validate(manifest.config["lora"]), base, said["base"], said["norms"])
    adapter.check()
    return adapter


@torch.no_grad()
def export(adapter: StoredAdapter, spec: ModelSpec, merged: nn.Module, inputs: Any, target: str) -> None:
    """Write the adapter, read it back, and compare the merged model with base and adapter on a sample."""
    write_adapter(adapter, target, None, causal=False)
    back = open_adapter(target, adapter.lora)
    back = back.renamed({name: key_of(name, None) for name in adapter.weights.outline})
    compare(target, back, adapter.weights.read, None)
    model = build_part(spec, Config(lora=adapter.lora, training=Training(mixed_precision_param="float32"))).eval()
    merged_state = merged.state_dict()
    for name, tensor in model.state_dict().items():
        if is_adapter(name):
            back.fill(name, tensor)
        elif name in adapter.base.outline and name not in adapter.saved.outline:
            adapter.base.fill(name, tensor)
        else:
            tensor.copy_(merged_state[name])
    pairs = zip(tree_leaves(call_with(model, inputs)), tree_leaves(call_with(merged, inputs)), strict=True)
    for one, other in pairs:
        if isinstance(one, torch.Tensor) and not torch.allclose(one, other, rtol=EXACT, atol=EXACT, equal_nan=True):
            raise Refusal(f"{target}: merged and unmerged weights give other outputs; report this")
    print(f"the adapter, {len(back.outline)} tensors, read back as the checkpoint has them: {target}")
