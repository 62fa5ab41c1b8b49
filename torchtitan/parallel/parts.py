"""The part of a model that a rank holds (all of it or some stages), and the weights that several stages share."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
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
        gradients = [_local(parameter) for parameter in self._parameters]
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


@dataclass(frozen=True)
class ModelParts:
    """The stages that this rank holds, by number; without a pipeline, one stage is the whole model."""

    stages: Mapping[int, nn.Module]
    ranks: Sequence[int]  # the pipeline rank of every stage
    axis: DeviceMesh
    dim: int  # width of the activations between stages
    vocab_size: int  # width of the last stage's output
    ties: Sequence[TiedWeight] = ()
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
