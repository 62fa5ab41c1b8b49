"""One weight that serves twice, as embedding and as output: on one stage it is one parameter, on two it has a copy."""

from collections.abc import Mapping, Sequence
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
    """The weight and its copy, as far as this rank holds them, on the first and the last stage of a pipeline."""

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
