"""What a model computes, as lists of operations, from which the planner counts seconds. No torch, and no family.

A number may be an array over many layouts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Number = Any  # float, or a numpy array of them


@dataclass(frozen=True)
class Share:
    """What one rank gets of a microbatch."""

    sequences: Number
    seq_len: Number
    tp: Number = 1
    cp: Number = 1
    ep: Number = 1

    @property
    def tokens(self) -> Number:
        return self.sequences * self.seq_len / self.cp


@dataclass(frozen=True)
class Operation:
    """`again`: which part of it backward computes once more, by the mode of recompute; all of it under "full".

    "stopped": the part of that where a recompute stops once backward has all that it needs.
    """

    again: Mapping[str, float] = field(default_factory=dict, kw_only=True)


@dataclass(frozen=True)
class Product(Operation):
    """[rows, inner] times [inner, columns], `count` times. Backward is two products of the same size."""

    rows: Number
    columns: Number
    inner: Number
    count: Number = 1
    in_float8: bool = True  # where the run asks for it


@dataclass(frozen=True)
class Attention(Operation):
    """Fused attention: FLOPs of forward under the causal mask."""

    flops: Number


@dataclass(frozen=True)
class Pass(Operation):
    """What only moves memory: bytes that it reads and writes, in forward and in backward."""

    forward: Number
    backward: Number
    fuses: bool = True  # a compiler joins it with its neighbours


@dataclass(frozen=True)
class Exchange(Operation):
    """Collectives over the ranks that share a layer, of a tensor of so many bytes; as many in backward."""

    kind: Literal["gather", "scatter", "all-reduce", "all-to-all"]
    bytes: Number
    count: Number = 1
    backward_count: Number | None = None  # None: as many as in forward
    axis: Literal["tp", "cp", "ep"] = "tp"

    @property
    def back(self) -> Number:
        return self.count if self.backward_count is None else self.backward_count


@dataclass(frozen=True)
class Block:
    operations: tuple[Operation, ...]
    parameters: Number  # of one tensor-parallel rank
    # Bytes that wait for backward, by the mode of recompute; "fused": those of "none" that a compiled layer drops.
    kept: Mapping[str, Number] = field(default_factory=dict)
    replicated: Number = 0  # parameters that all tensor-parallel ranks hold, each with its own part of the gradient
    # Moments of backward, without and with recompute ("none", "again"): bytes beyond those that wait under "none" (or
    # fewer), and parameters that have a gradient by then.
    working: Mapping[str, Sequence[tuple[Number, Number]]] = field(default_factory=dict)
    experts: Number = 0  # parameters, beside those above, that only the ranks with the same experts share


@dataclass(frozen=True)
class Work:
    """A whole model on one microbatch."""

    layer: Block
    num_layers: int
    ends: Block  # what follows the last layer; a lookup before the first costs nothing
    sent: Number  # bytes of what one stage sends the next
    num_parameters: Number  # of one tensor-parallel rank, with both ends; without experts
    lookup: Number = 0  # parameters of the table before the first layer, likewise
    start: tuple[Exchange, ...] = ()  # what follows that table
    entering: Number = 0  # bytes of a microbatch that wait for backward before the first layer, beside its input

    @property
    def is_tied(self) -> Any:
        """Whether the output layer's weight is the table that tokens are looked up in."""
        return self.num_parameters - self.num_layers * self.layer.parameters <= self.ends.parameters
