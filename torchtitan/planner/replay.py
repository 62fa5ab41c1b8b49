"""One block runs, the others replay its record: a model's blocks are alike, and so is what each does to memory.

Needed by the dry run, where a block's fake operations take a tenth of a second and a big model has hundreds of
blocks times microbatches. What FSDP does around a block, pipelining and the loss are run each time.
"""

import gc
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torchtitan.planner.footprint import Event, Footprint


@dataclass(frozen=True)
class Record:
    """What one block's forward and backward did, and how to make what they gave."""

    forward: list[Event]
    backward: list[Event]
    moved: tuple[Counter[str], Counter[str]]
    output: Callable[[], Tensor]
    gradients: list[Callable[[], Tensor]]


class Replay:
    """Exchanges the forward of blocks; the first of each sort runs when it is first called."""

    def __init__(self, footprint: Footprint) -> None:
        self.footprint = footprint
        self.records: dict[tuple, Record] = {}

    def apply(self, blocks: Iterable[nn.Module]) -> None:
        for block in blocks:
            block.forward = self._replayed(block, block.forward)

    def _replayed(self, block: nn.Module, forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(x: Tensor, *rest: Any) -> Tensor:
            parameters = list(block.parameters())
            key = type(block), x.shape, x.dtype
            if key not in self.records:
                self.records[key] = self._record(forward, x, rest, parameters)
            return _Replayed.apply(self.footprint, self.records[key], rest, x, *parameters)

        return call

    def _record(self, forward: Callable[..., Tensor], x: Tensor, rest: tuple, parameters: Sequence[Tensor]) -> Record:
        """Run a block once, forward and backward, and keep its events out of the footprint's own."""
        footprint = self.footprint
        events, moved = footprint.events, footprint.moved
        x = x.detach().requires_grad_()
        footprint.events, footprint.moved = [], Counter()
        output = forward(x, *rest)
        forward_events, moved_forward = footprint.events, footprint.moved
        forward_events.append(footprint.end_of(output))
        footprint.events, footprint.moved = [], Counter()
        # The product's gradient is autograd's alone, so that it may add to it in place, as it may in a run.
        gradients = list(torch.autograd.grad((output * 0).sum(), [x, *parameters]))
        backward_events, moved_backward = footprint.events, footprint.moved
        footprint.mark(gradients[1:], "gradients")
        backward_events += [footprint.end_of(gradient) for gradient in gradients]
        record = Record(
            forward_events.copy(),
            backward_events.copy(),
            (moved_forward, moved_backward),
            _maker(output),
            [_maker(gradient) for gradient in gradients],
        )
        del output, gradients, x
        gc.collect()
        footprint.events, footprint.moved = events, moved
        return record


class _Replayed(torch.autograd.Function):
    """Stands for a block between the same neighbours: takes and gives the same tensors."""

    @staticmethod
    def forward(ctx: Any, footprint: Footprint, record: Record, rest: tuple, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.footprint, ctx.record = footprint, record
        ctx.save_for_backward(x, *(value for value in rest if isinstance(value, Tensor)))
        footprint.events += record.forward
        footprint.moved += record.moved[0]
        return record.output()

    @staticmethod
    def backward(ctx: Any, arriving: Tensor) -> tuple[Tensor | None, ...]:
        footprint, record = ctx.footprint, ctx.record
        number, size = footprint.end_of(arriving)  # the record has its own
        footprint.events += [(number, size), *record.backward, (number, -size)]
        footprint.moved += record.moved[1]
        return None, None, None, *(make() for make in record.gradients)


def _maker(tensor: Tensor) -> Callable[[], Tensor]:
    """Makes a fake tensor like this one, which it does not keep."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    size, dtype, device = local.shape, local.dtype, local.device
    spec = tensor._spec if isinstance(tensor, DTensor) else None

    def make() -> Tensor:
        made = torch.empty(size, dtype=dtype, device=device)
        return made if spec is None else DTensor(made, spec, requires_grad=False)  # from_local costs ten times this

    return make
