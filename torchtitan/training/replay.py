"""One block runs, the others are booked: a model's blocks are alike, and so is what each does to memory.

Needed by the dry run, where a block's fake operations take a tenth of a second and a big model has hundreds of
blocks times microbatches. What FSDP does around a block, pipelining and the loss are run each time.
"""

import gc
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torchtitan.observe.footprint import Event, Footprint


@dataclass(frozen=True)
class Shape:
    """All there is to a fake tensor."""

    shape: torch.Size
    dtype: torch.dtype
    wrap: Callable[[Tensor], Tensor]  # into a DTensor, if it was one

    def make(self, device: torch.device) -> Tensor:
        return self.wrap(torch.empty(self.shape, dtype=self.dtype, device=device))


@dataclass(frozen=True)
class Record:
    """What one block's forward and backward did."""

    forward: list[Event]
    backward: list[Event]
    moved: tuple[Counter[str], Counter[str]]
    # Results, and what it takes to book them off again: they are made anew each time.
    output: Shape
    gradients: list[Shape]
    output_off: Event
    gradients_off: list[Event]


class Replay:
    """Exchanges the forward of blocks; the first of each sort runs when it is first called."""

    def __init__(self, footprint: Footprint, accumulates: bool) -> None:
        """`accumulates`: gradients are kept from one microbatch to the next, where they cost memory once."""
        self.footprint, self.accumulates = footprint, accumulates
        self.records: dict[tuple, Record] = {}

    def apply(self, blocks: Iterable[nn.Module]) -> None:
        for block in blocks:
            block.forward = _Replayed(self, block)  # type: ignore[method-assign, assignment]

    def record(self, forward: Callable[..., Tensor], x: Tensor, rest: tuple, parameters: list[Tensor]) -> Record:
        """Run a block once, forward and backward, and take it out of the books again."""
        footprint = self.footprint
        events, moved = footprint.events, footprint.moved
        x = x.detach().requires_grad_()
        arriving = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        footprint.events, footprint.moved = [], Counter()
        output = forward(x, *rest)
        middle, moved_forward = len(footprint.events), footprint.moved
        footprint.moved = Counter()
        gradients = list(torch.autograd.grad(output, [x, *parameters], arriving))
        forward_events, backward_events = footprint.events[:middle], footprint.events[middle:]
        moved_backward = footprint.moved
        locals_ = [g.to_local() if isinstance(g, DTensor) else g for g in gradients]
        footprint.mark(locals_[1:], "gradients")
        record = Record(
            forward_events,
            backward_events,
            (moved_forward, moved_backward),
            _shape_of(output),
            [_shape_of(gradient) for gradient in gradients],
            (footprint.number(output), -output.untyped_storage().nbytes()),
            [(footprint.number(g), -g.untyped_storage().nbytes()) for g in locals_],
        )
        del output, gradients, locals_, arriving, x
        gc.collect()
        footprint.events, footprint.moved = events, moved
        return record


class _Replayed:
    def __init__(self, replay: Replay, block: nn.Module) -> None:
        self.replay, self.block, self.forward = replay, block, block.forward
        self.has_gradients = False

    def __call__(self, x: Tensor, *rest: Any) -> Tensor:
        parameters = list(self.block.parameters())
        key = type(self.block), x.shape, x.dtype
        record = self.replay.records.get(key)
        if record is None:
            record = self.replay.records[key] = self.replay.record(self.forward, x, rest, parameters)
        return _Booked.apply(self, record, rest, x, *parameters)


class _Booked(torch.autograd.Function):
    """Stands for a block between the same neighbours: takes and gives the same tensors."""

    @staticmethod
    def forward(ctx: Any, block: _Replayed, record: Record, rest: tuple, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.block, ctx.record = block, record
        ctx.save_for_backward(x, *(value for value in rest if isinstance(value, Tensor)))
        footprint = block.replay.footprint
        footprint.events += [*record.forward, record.output_off]
        footprint.moved += record.moved[0]
        return record.output.make(x.device)

    @staticmethod
    def backward(ctx: Any, arriving: Tensor) -> tuple[Tensor | None, ...]:
        block, record = ctx.block, ctx.record
        footprint = block.replay.footprint
        footprint.events += [*record.backward, *record.gradients_off]
        footprint.moved += record.moved[1]
        if block.has_gradients and block.replay.accumulates:
            gradients: list[Tensor | None] = [record.gradients[0].make(arriving.device)]
            gradients += [None] * (len(record.gradients) - 1)
        else:
            gradients = [shape.make(arriving.device) for shape in record.gradients]
        block.has_gradients = True
        return None, None, None, *gradients


def _shape_of(tensor: Tensor) -> Shape:
    if not isinstance(tensor, DTensor):
        return Shape(tensor.shape, tensor.dtype, lambda local: local)
    mesh, placements, shape, stride = tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride()

    def wrap(local: Tensor) -> Tensor:
        return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)

    return Shape(tensor.to_local().shape, tensor.dtype, wrap)
