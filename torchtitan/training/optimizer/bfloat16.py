"""AdamW whose two moments are kept in bfloat16 and rounded stochastically."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from torchtitan.config.schema import Compile
from torchtitan.training.optimizer.apply import local_part

# Elements updated at a time. Without a compiler each operation makes a new tensor of this size.
_ELEMENTS, _ELEMENTS_COMPILED = 1 << 24, 1 << 30


class BFloat16AdamW(torch.optim.AdamW):
    """AdamW with moments in bfloat16, which halves the optimizer's memory.

    Rounding is stochastic: a change too small for bfloat16 is sometimes rounded up, so often that the average is right
    and small changes add up (arXiv:2010.06192). The random bits are a hash of the step and of the element's index in
    the whole parameter, so every layout rounds alike.
    """

    def __init__(self, groups: list[dict[str, Any]], compile_: Compile | None, **options: Any) -> None:
        super().__init__(groups, **options)
        self._update: Callable[..., None] = _update
        self._elements = _ELEMENTS
        # Made once: the copy to a GPU makes the host wait.
        self._places: dict[tuple[Tensor, int, bool], tuple[list[int], Tensor]] = {}
        if compile_ is not None:  # compiled, the update is one pass over memory and makes no tensors in between
            self._update = torch.compile(_update, backend=compile_.backend, dynamic=True, fullgraph=True)
            self._elements = _ELEMENTS_COMPILED

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        devices = [local_part(p).device for group in self.param_groups for p in group["params"]]
        if not devices:  # update_in_backward is at one of Muon's matrices
            return
        device = devices[0]
        scale = self.grad_scale.to(device)  # type: ignore[attr-defined]
        applies = 1.0 - self.found_inf.to(device)  # type: ignore[attr-defined]
        does_apply = applies.bool()
        for group in self.param_groups:
            rate = torch.tensor(group["lr"])  # a tensor, because a new number each step would mean a new compilation
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["step"] = torch.zeros((), device=device)
                    state["exp_avg"] = torch.zeros_like(parameter, dtype=torch.bfloat16)
                    state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=torch.bfloat16)
                state["step"] += applies
                for place, piece in self._pieces(parameter, state):
                    self._update(
                        *piece,
                        place,
                        state["step"],
                        does_apply,
                        scale,
                        rate,
                        *group["betas"],
                        group["eps"],
                        group["weight_decay"],
                    )

    def _pieces(self, parameter: Tensor, state: dict[str, Any]) -> Iterator[tuple[Tensor, list[Tensor]]]:
        """Parameter, gradient and moments in pieces of at most `_elements`, and where each piece lies in the whole."""
        assert parameter.grad is not None
        # Detached, because a compiler would look at the gradient of what is a view of a parameter.
        tensors = [local_part(t).detach() for t in (parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"])]
        tensors = [t[None] if t.ndim == 0 else t for t in tensors]
        rows, columns = len(tensors[0]), tensors[0][:1].numel()
        size = max(1, self._elements // max(1, columns))
        for begin in range(0, rows if columns else 0, size):
            piece = [tensor[begin : begin + size] for tensor in tensors]
            key = parameter, begin, all(tensor.is_contiguous() for tensor in piece)
            if key not in self._places:
                self._places[key] = _place(*key, piece[0])
            lengths, place = self._places[key]
            yield place, [tensor.view(lengths) for tensor in piece]


def _update(
    parameter: Tensor,
    gradient: Tensor,
    mean: Tensor,
    mean_square: Tensor,
    place: Tensor,
    step: Tensor,
    applies: Tensor,
    scale: Tensor,
    rate: Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> None:
    """Update one tensor in place as torch's AdamW does, or change nothing if `applies` is false."""
    gradient = gradient.float() / scale
    m = torch.lerp(gradient, mean.float(), beta1)
    v = torch.lerp(gradient.square(), mean_square.float(), beta2)
    denominator = (v / (1 - beta2**step)).sqrt() + eps
    changed = parameter.float() * (1 - rate * weight_decay) - rate / (1 - beta1**step) * m / denominator
    noise = _hash(_numbers(parameter, place) ^ _hash(step.int()))
    parameter.copy_(torch.where(applies, changed, parameter))
    mean.copy_(torch.where(applies, _round_at_random(m, noise & 0xFFFF), mean))
    mean_square.copy_(torch.where(applies, _round_at_random(v, (noise >> 16) & 0xFFFF), mean_square))


def _place(parameter: Tensor, begin: int, merges: bool, piece: Tensor) -> tuple[list[int], Tensor]:
    """The lengths of a piece's dims, and where it lies in the whole: each dim's first index, and the whole's size.

    With `merges` a dim that the rank holds whole becomes one with the dim before it, so that a kernel does not divide
    to find an element's row.
    """
    sizes = list(parameter.shape) or [1]
    offsets = [0] * len(sizes)
    if isinstance(parameter, DTensor):
        offsets = list(parameter.__create_chunk_list__()[0].offsets) or [0]
    offsets[0] += begin
    lengths: list[int] = []
    place: list[tuple[int, int]] = []
    for length, offset, size in zip(piece.shape, offsets, sizes, strict=True):
        if merges and lengths and length == size:
            lengths[-1] *= size
            place[-1] = place[-1][0] * size, place[-1][1] * size
        else:
            lengths.append(length)
            place.append((offset, size))
    return lengths, torch.tensor(place).int().to(piece.device)  # beyond int32 it wraps around


def _numbers(shard: Tensor, place: Tensor) -> Tensor:
    """The index of each element in the flattened whole parameter, as int32 that may wrap around.

    torch 2.11 computes an int32 times an integer argument in int64, so the caller passes `place` as an int32 tensor.
    """
    numbers = torch.zeros((), dtype=torch.int32, device=shard.device)
    for dim, length in enumerate(shard.shape):
        indices = torch.arange(length, dtype=torch.int32, device=shard.device) + place[dim, 0]
        numbers = numbers[..., None] * place[dim, 1] + indices
    return numbers


def _hash(x: Tensor) -> Tensor:
    """32 bits that look random (lowbias32 by C. Wellons). The masks are there because int32 shifts copy the sign."""
    x = (x ^ ((x >> 16) & 0xFFFF)) * 0x7FEB352D
    x = (x ^ ((x >> 15) & 0x1FFFF)) * (0x846CA68B - (1 << 32))
    return x ^ ((x >> 16) & 0xFFFF)


def _round_at_random(x: Tensor, noise: Tensor) -> Tensor:
    """Round to bfloat16, up or down by 16 bits of noise, so that the average is right."""
    bits = (x.view(torch.int32) + noise) & ~0xFFFF
    return bits.view(torch.float32).bfloat16()
