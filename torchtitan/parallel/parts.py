"""What a rank holds of a model: all of it or some stages, and a tied weight, which two stages may share."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor


def tie(model: nn.Module, names: tuple[str, str] | None) -> bool:
    """Make both names one parameter again where the module has both; whether it has."""
    if names is None:
        return False
    owners = [_owner(model, name) for name in names]
    if None in owners:
        return False
    (first, first_leaf), (second, second_leaf) = owners  # type: ignore[misc]
    setattr(second, second_leaf, getattr(first, first_leaf))
    return True


def _owner(model: nn.Module, name: str) -> tuple[nn.Module, str] | None:
    """The module that has the parameter, if it is in this stage, and the parameter's name there."""
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
        """Give both the sum of their gradients, so that they stay the same."""
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
        """Give a copy that lies beside the first on this rank the first's values and optimizer states."""
        if self.first is None or self.copy is None:
            return
        self.copy.copy_(self.first)
        for key, value in states.get(self.first, {}).items():
            states[self.copy][key].copy_(value)


@dataclass(frozen=True)
class ModelParts:
    """What this rank holds of a model: all of it, or its stages of a pipeline, each by its number."""

    stages: Mapping[int, nn.Module]
    ranks: Sequence[int]  # of all stages, which pipeline rank holds them
    axis: DeviceMesh
    dim: int  # of the activations between stages
    vocab_size: int  # of what the last one gives
    tied: TiedWeight | None = None

    def parameters(self) -> Iterator[nn.Parameter]:
        for stage in self.stages.values():
            yield from stage.parameters()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """By the names they have in the model, however its blocks are wrapped."""
        for stage in self.stages.values():
            for name, parameter in stage.named_parameters():
                yield name.replace("_checkpoint_wrapped_module.", ""), parameter

    def saved_parameters(self) -> dict[str, nn.Parameter]:
        """By the names they are saved and loaded by: a tied weight and its copy have one."""
        named: dict[str, nn.Parameter] = {}
        for name, parameter in self.named_parameters():
            is_copy = self.tied is not None and parameter is self.tied.copy
            named.setdefault(self.tied.names[0] if self.tied and is_copy else name, parameter)
        return named

    @property
    def has_loss(self) -> bool:
        return len(self.ranks) - 1 in self.stages

    def own_gradients(self) -> list[Tensor]:
        """The gradients here, those of a tied weight on one stage only."""
        copy = self.tied.copy if self.tied else None
        own = [p.grad for p in self.parameters() if p.grad is not None and p is not copy]
        if not own and copy is not None and copy.grad is not None:  # a stage that has nothing else
            own = [torch.zeros_like(copy.grad)]
        return own
