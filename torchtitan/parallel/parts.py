"""The part of a model that a rank holds: all of it, or some stages of a pipeline; and its part of one tensor."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from torchtitan.parallel.loss_scale import LossScale
    from torchtitan.parallel.tied import TiedWeight


def tie(model: nn.Module, names: tuple[str, str] | None) -> bool:
    """Make both names one parameter again, if the module has both. Returns whether it has."""
    if names is None:
        return False
    owners = [_owner(model, name) for name in names]
    if None in owners:
        return False
    (first, first_leaf), (second, second_leaf) = owners  # type: ignore[misc]
    setattr(second, second_leaf, getattr(first, first_leaf))
    return True


def _owner(model: nn.Module, name: str) -> tuple[nn.Module, str] | None:
    """The module that holds the parameter, if this stage has it, and the parameter's name in that module."""
    module, _, leaf = name.rpartition(".")
    try:
        return model.get_submodule(module), leaf
    except AttributeError:
        return None


@dataclass(frozen=True)
class ModelParts:
    """The stages that this rank holds, by number; without a pipeline, one stage is the whole model."""

    stages: Mapping[int, nn.Module]
    ranks: Sequence[int]  # the pipeline rank of every stage
    axis: DeviceMesh
    dim: int  # width of the activations between stages
    vocab_size: int  # width of the last stage's output
    ties: "Sequence[TiedWeight]" = ()
    loss_scale: "LossScale | None" = None  # with float16
    adapter: Any = None  # a lora.adapter.Adapter: then checkpoints hold no other weights
    reference: Any = None  # a preference.run.Reference: a frozen model beside it
    load: Any = None  # an experts.load.Load, where the model has experts

    def parameters(self) -> Iterator[nn.Parameter]:
        for stage in self.stages.values():
            yield from stage.parameters()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for stage in self.stages.values():
            yield from stage.named_parameters()

    def saved_parameters(self) -> dict[str, nn.Parameter]:
        """Parameters under the names of a checkpoint, where a tied weight and its copy are one entry."""
        named: dict[str, nn.Parameter] = {}
        first = {id(copy): tie.name for tie in self.ties for copy in tie.copies}
        for name, parameter in self.named_parameters():
            named.setdefault(first.get(id(parameter), name), parameter)
        return named

    @property
    def has_loss(self) -> bool:
        return len(self.ranks) - 1 in self.stages

    def own_gradients(self) -> list[Tensor]:
        """This rank's gradients; a tied weight counts on one stage only."""
        copies = {id(copy) for tie in self.ties for copy in tie.copies}
        own = [p.grad for p in self.parameters() if p.grad is not None and id(p) not in copies]
        if not own:  # the stage holds nothing else
            own = [torch.zeros_like(p.grad) for p in self.parameters() if p.grad is not None]
        return own or [torch.zeros(1, device=parameter.device) for parameter in islice(self.parameters(), 1)]  # frozen


@torch.no_grad()
def copy_part(tensor: Tensor, read: Callable[[tuple[slice, ...]], Tensor]) -> None:
    """Read this rank's part of a tensor, in the tensor's own type."""
    part = tuple(slice(0, size) for size in tensor.shape)
    if isinstance(tensor, DTensor):
        for chunk in tensor.__create_chunk_list__():  # DTensor's description of itself for checkpoints
            part = tuple(slice(o, o + size) for o, size in zip(chunk.offsets, chunk.sizes, strict=True))
        tensor = tensor.to_local()
    if tensor.numel():  # a rank beyond the last row holds nothing
        tensor.copy_(read(part))
