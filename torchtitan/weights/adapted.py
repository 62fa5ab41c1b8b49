"""A model that a run has trained an adapter for: the base's weights, each with its adapter added when it is read."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchtitan.config.schema import Lora
from torchtitan.lora.layers import scaling_of
from torchtitan.lora.names import is_adapter, layer_of
from torchtitan.parallel.parts import copy_part
from torchtitan.refusal import Refusal
from torchtitan.weights.base import Base
from torchtitan.weights.tensors import Weights


@dataclass(frozen=True)
class StoredAdapter:
    """An adapter and what it belongs to."""

    saved: Weights  # what the checkpoint holds: lora_A and lora_B under the model's names, and a module's buffers
    lora: Lora
    base: Weights
    where: str  # the base
    norms: Mapping[str, float]  # of whole tensors, as the run held them

    @property
    def weights(self) -> Weights:
        """The adapter alone."""
        return self.saved.renamed({name: name for name in self.saved.outline if is_adapter(name)})

    @property
    def layers(self) -> list[str]:
        return list(dict.fromkeys(map(layer_of, self.weights.outline)))

    def check(self) -> None:
        """Refuse a checkpoint that does not hold all that the run held."""
        for name in self.weights.outline:
            found, held = float(self.weights.read(name).double().norm()), self.norms.get(name)
            slack = 1e-6 if self.weights.outline[name].dtype == torch.float32 else 1e-2  # saved in another type
            if held is None or abs(found - held) > slack * max(held, 1e-30):
                raise Refusal(
                    f"{self.weights.where} is not whole: {name} has the norm {found:.6g}, and the run held {held}; use "
                    "another step"
                )


def open_base(said: Mapping[str, Any], others: Iterable[str], find: Callable[[str], tuple[Base, Any]]) -> Any:
    """The base that a manifest names, or one of other paths, if it is the one that the adapter was trained on."""
    tried = []
    for path in dict.fromkeys([said["base"], *others]):
        if "://" not in path and not Path(path).exists():
            tried.append(f"{path} is not there")
            continue
        base, opened = find(path)
        if (found := base.fingerprint()) == said["hash"]:
            return opened
        tried.append(f"{base.where} holds other weights (SHA-256 {found[:12]}, trained on {said['hash'][:12]})")
    raise Refusal(f"the base of this adapter is missing: {'; '.join(tried)}; put it back where it was")


def merged(adapter: StoredAdapter) -> Weights:
    """The base's weights with the adapter added in float32, each when it is read."""
    scaling, changed = scaling_of(adapter.lora), {f"{layer}.weight" for layer in adapter.layers}
    if unknown := sorted(changed - adapter.base.outline.keys()):
        raise Refusal(f"{adapter.where} has no {unknown[0]}, which {adapter.saved.where} has an adapter for")
    kept = {name: like for name, like in adapter.saved.outline.items() if not is_adapter(name)}

    def fill(name: str, tensor: Tensor) -> None:
        if name not in changed:
            (adapter.saved if name in adapter.saved.outline else adapter.base).fill(name, tensor)
            return
        layer = layer_of(name)
        a, b = (adapter.saved.read(f"{layer}.{part}", torch.float32) for part in ("lora_A", "lora_B"))
        whole = torch.addmm(adapter.base.read(name, torch.float32), b, a, alpha=scaling)
        copy_part(tensor, whole.__getitem__)

    return Weights(adapter.saved.where, adapter.base.outline | kept, fill)
