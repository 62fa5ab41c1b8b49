"""Run one block and replay its record for the blocks that do the same, because what they do to memory is the same.

A block's operations on fake tensors take a tenth of a second, and a big model has hundreds of blocks times
microbatches. The work of FSDP around a block, pipelining and the loss run every time.
"""

import gc
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torchtitan.tools.dry_run.footprint import Event, Footprint, tensors_in
from torchtitan.tools.dry_run.structure import block_structure, structure

Maker = Callable[[], Tensor | None]


@dataclass(frozen=True)
class Record:
    """The events of one block's forward and backward, and how to make the tensors that the two return."""

    forward: list[Event]
    backward: list[Event]
    moved: tuple[Counter[str], Counter[str]]
    output: Maker
    gradients: list[Maker]


class Replay:
    """Replaces the forward of blocks. A block runs only if there is no record yet of the same work."""

    def __init__(self, footprint: Footprint) -> None:
        self.footprint = footprint
        self.records: dict[Hashable, Record] = {}

    def apply(self, blocks: Iterable[nn.Module]) -> None:
        for block in blocks:
            block.forward = self._replayed(block, block.forward, block_structure(block))

    def _replayed(self, block: nn.Module, forward: Callable[..., Tensor], of_block: Hashable) -> Callable[..., Tensor]:
        def call(x: Tensor, *rest: Any, **named: Any) -> Tensor:
            others = tensors_in([rest, named])
            if any(tensor.requires_grad for tensor in others):
                return forward(x, *rest, **named)  # a record has gradients of x and the parameters only
            parameters = list(block.parameters())
            key = of_block, structure([x, rest, named, parameters])
            if key not in self.records:
                self.records[key] = self._record(lambda x: forward(x, *rest, **named), x, parameters)
            return _Replayed.apply(self.footprint, self.records[key], others, x, *parameters)

        return call

    def _record(self, run: Callable[[Tensor], Tensor], x: Tensor, parameters: Sequence[Tensor]) -> Record:
        """Run a block once, forward and backward, and keep its events out of the footprint's own."""
        footprint = self.footprint
        events, moved = footprint.events, footprint.moved
        x = x.detach().requires_grad_(x.requires_grad)
        footprint.events, footprint.moved = [], Counter()
        output = run(x)
        forward_events, moved_forward = [*footprint.events, footprint.end_of(output)], footprint.moved
        # Backward of a product makes a gradient that autograd alone owns and may add to in place, as in a run.
        product, arriving = output * 0, torch.empty_like(output)
        trained = [tensor for tensor in (x, *parameters) if tensor.requires_grad]
        footprint.events, footprint.moved = [], Counter()
        found = iter(torch.autograd.grad(product, trained, arriving, allow_unused=True) if trained else ())
        gradients = [next(found) if tensor.requires_grad else None for tensor in (x, *parameters)]
        footprint.mark((gradient for gradient in gradients[1:] if gradient is not None), "gradients")
        ends = [footprint.end_of(gradient) for gradient in gradients if gradient is not None]
        record = Record(
            forward_events,
            [*footprint.events, *ends],
            (moved_forward, footprint.moved),
            _maker(output),
            [_maker(gradient) for gradient in gradients],
        )
        del output, product, arriving, gradients, found, trained, x
        gc.collect()
        footprint.events, footprint.moved = events, moved
        return record


class _Replayed(torch.autograd.Function):
    """Takes the place of a block in autograd's graph: the same tensors go in and come out, forward and backward."""

    @staticmethod
    def forward(ctx: Any, footprint: Footprint, record: Record, others: list, x: Tensor, *parameters: Tensor) -> Any:
        ctx.footprint, ctx.record = footprint, record
        ctx.save_for_backward(x, *others)
        footprint.events += record.forward
        footprint.moved += record.moved[0]
        return record.output()

    @staticmethod
    def backward(ctx: Any, arriving: Tensor) -> tuple[Tensor | None, ...]:
        footprint, record = ctx.footprint, ctx.record
        number, size = footprint.end_of(arriving)  # counted as freed meanwhile, because the record counts its own
        footprint.events += [(number, size), *record.backward, (number, -size)]
        footprint.moved += record.moved[1]
        return None, None, None, *(make() for make in record.gradients)


def _maker(tensor: Tensor | None) -> Maker:
    """Makes fake tensors like this one, without keeping it alive; None for a gradient that a block does not have."""
    if tensor is None:
        return lambda: None
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    size, dtype, device = local.shape, local.dtype, local.device
    spec = tensor._spec if isinstance(tensor, DTensor) else None

    def make() -> Tensor:
        made = torch.empty(size, dtype=dtype, device=device)
        return made if spec is None else DTensor(made, spec, requires_grad=False)  # ten times as fast as from_local

    return make
