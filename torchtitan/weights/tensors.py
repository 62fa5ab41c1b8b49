"""Named tensors that are read one at a time, into a plain tensor or into this rank's part of a sharded one."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from torchtitan.refusal import Refusal


@dataclass(frozen=True)
class Weights:
    """Named tensors, none of them read yet."""

    where: str
    outline: dict[str, Tensor]  # on the meta device
    fill: Callable[[str, Tensor], None]  # reads into a tensor; for a sharded one, only this rank's part

    def read(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        like = self.outline[name]
        tensor = torch.empty(like.shape, dtype=dtype or like.dtype)
        self.fill(name, tensor)
        return tensor

    def check(self, wanted: Mapping[str, Tensor]) -> None:
        """Refuse missing names, unexpected names and other shapes."""
        faults = [f"missing: {name}" for name in wanted if name not in self.outline]
        faults += [f"unexpected: {name}" for name in self.outline if name not in wanted]
        faults += [
            f"wrong shape: {name} is {tuple(found.shape)}, the model's is {tuple(wanted[name].shape)}"
            for name, found in self.outline.items()
            if name in wanted and found.shape != wanted[name].shape
        ]
        if faults:
            raise Refusal("\n  ".join([f"{self.where} does not fit the model:", *faults]))

    def renamed(self, old_names: Mapping[str, str]) -> "Weights":
        """The same weights under new names; `old_names` maps new to old."""
        outline = {new: self.outline[old] for new, old in old_names.items()}
        return replace(self, outline=outline, fill=lambda name, tensor: self.fill(old_names[name], tensor))
