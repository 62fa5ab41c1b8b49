"""Weights that several stages of a pipeline share. A run without a pipeline does not load this file."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor


class TiedWeight:
    """A weight that several stages have, such as embedding and output: the first has it, the others have copies.

    `numbers` are those of the stages, and `names` its names there.
    """

    def __init__(
        self,
        names: Sequence[str],
        numbers: Sequence[int],
        stages: Mapping[int, nn.Module],
        ranks: Sequence[int],
        axis: DeviceMesh,
    ) -> None:
        self.name, self._axis = names[0], axis
        self._ranks = sorted({ranks[number] for number in numbers})
        self._held = [(stages[number], name) for number, name in zip(numbers, names, strict=True) if number in stages]
        self._has_first = numbers[0] in stages

    @property
    def copies(self) -> list[nn.Parameter]:
        """Those of this rank; the first is none."""
        return self._parameters[self._has_first :]

    @property
    def _parameters(self) -> list[nn.Parameter]:
        return [stage.get_parameter(name) for stage, name in self._held]

    @torch.no_grad()
    def sum_gradients(self) -> None:
        """Set all gradients to their sum, so that the copies stay equal."""
        gradients = [_local(parameter) for parameter in self._parameters if parameter.requires_grad]
        if not gradients:
            return
        own, group, me = (
            sum(gradients[1:], gradients[0]).contiguous(),
            self._axis.get_group(),
            self._axis.get_local_rank(),
        )
        sums = {rank: own if rank == me else torch.empty_like(own) for rank in self._ranks}
        exchange = []
        for rank in self._ranks:
            if rank != me:
                exchange.append(dist.P2POp(dist.isend, own, group=group, group_peer=rank))
                exchange.append(dist.P2POp(dist.irecv, sums[rank], group=group, group_peer=rank))
        for work in dist.batch_isend_irecv(exchange) if exchange else []:
            work.wait()
        first, *others = sums.values()  # in the same order on all ranks
        total = sum(others, first)
        for gradient in gradients:
            gradient.copy_(total)

    @torch.no_grad()
    def copy_first(self, states: Mapping[Any, dict[str, Tensor]]) -> None:
        """If this rank holds the first and copies, give these its values and optimizer states."""
        if not self._has_first:
            return
        first, *copies = self._parameters
        for copy in copies:
            copy.copy_(first)
            for key, value in states.get(first, {}).items():
                states[copy][key].copy_(value)


def _local(parameter: nn.Parameter) -> Tensor:
    gradient = parameter.grad
    assert gradient is not None
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient
