"""The part of a model that a rank holds (all of it or some stages), and the weight that two stages may share."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from torchtitan.parallel.loss_scale import LossScale


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


class TiedWeight:
    """A weight that is embedding and output: one parameter on one stage, with a copy where two stages have it."""

    def __init__(
        self, names: tuple[str, str], stages: Mapping[int, nn.Module], ranks: Sequence[int], axis: DeviceMesh
    ) -> None:
        last = len(ranks) - 1
        self.names, self._ranks, self._axis = names, ranks, axis
        self.first = stages[0].get_parameter(names[0]) if last > 0 and 0 in stages else None
        self.copy = stages[last].get_parameter(names[1]) if last > 0 and last in stages else None

    @torch.no_grad()
    def sum_gradients(self) -> None:
        """Set both gradients to their sum, so that the two copies stay equal."""
        if self.first is not None and self.copy is not None:
            assert self.first.grad is not None and self.copy.grad is not None
            total = self.first.grad + self.copy.grad
            self.first.grad.copy_(total), self.copy.grad.copy_(total)
        elif self.first is not None:
            self._add_gradient_of(self.first, self._ranks[-1])
        elif self.copy is not None:
            self._add_gradient_of(self.copy, self._ranks[0])

    def _add_gradient_of(self, parameter: nn.Parameter, other: int) -> None:
        assert isinstance(parameter.grad, DTensor)
        mine = parameter.grad.to_local()
        theirs, group = torch.empty_like(mine), self._axis.get_group()
        exchange = [
            dist.P2POp(dist.isend, mine.contiguous(), group=group, group_peer=other),
            dist.P2POp(dist.irecv, theirs, group=group, group_peer=other),
        ]
        for work in dist.batch_isend_irecv(exchange):
            work.wait()
        mine += theirs

    @torch.no_grad()
    def copy_first(self, states: Mapping[Any, dict[str, Tensor]]) -> None:
        """If this rank holds both, give the copy the first one's values and optimizer states."""
        if self.first is None or self.copy is None:
            return
        self.copy.copy_(self.first)
        for key, value in states.get(self.first, {}).items():
            states[self.copy][key].copy_(value)


@dataclass(frozen=True)
class ModelParts:
    """The stages that this rank holds, by number; without a pipeline, one stage is the whole model."""

    stages: Mapping[int, nn.Module]
    ranks: Sequence[int]  # the pipeline rank of every stage
    axis: DeviceMesh
    dim: int  # width of the activations between stages
    vocab_size: int  # width of the last stage's output
    tied: TiedWeight | None = None
    loss_scale: "LossScale | None" = None  # with float16

    def parameters(self) -> Iterator[nn.Parameter]:
        for stage in self.stages.values():
            yield from stage.parameters()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for stage in self.stages.values():
            yield from stage.named_parameters()

    def saved_parameters(self) -> dict[str, nn.Parameter]:
        """Parameters under the names of a checkpoint, where a tied weight and its copy are one entry."""
        named: dict[str, nn.Parameter] = {}
        for name, parameter in self.named_parameters():
            is_copy = self.tied is not None and parameter is self.tied.copy
            named.setdefault(self.tied.names[0] if self.tied and is_copy else name, parameter)
        return named

    @property
    def has_loss(self) -> bool:
        return len(self.ranks) - 1 in self.stages

    def own_gradients(self) -> list[Tensor]:
        """This rank's gradients; a tied weight counts on one stage only."""
        copy = self.tied.copy if self.tied else None
        own = [p.grad for p in self.parameters() if p.grad is not None and p is not copy]
        if not own and copy is not None and copy.grad is not None:  # the stage holds nothing else
            own = [torch.zeros_like(copy.grad)]
        return own
