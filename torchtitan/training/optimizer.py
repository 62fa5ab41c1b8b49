"""AdamW or Muon over a model's parameters, and the update that leaves itself out when gradients are not finite."""

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torchtitan.config.schema import Compile, Optimizer

_ELEMENTS = 1 << 24  # of a tensor that are updated at a time where each operation is a pass of its own
_MOST_IN_A_GROUP = 100  # a first update of n sharded tensors in one call takes n^2: 2.3 s for the 723 of Llama 3 70B
_ENDS = ("tok_embeddings.", "output.")  # matrices whose rows are tokens, which Muon is not for


def build_optimizer(
    named_parameters: Iterable[tuple[str, nn.Parameter]], config: Optimizer, compile_: Compile | None = None
) -> torch.optim.Optimizer:
    """The optimizer; weight decay on everything, or on matrices only."""
    named = [(name, p) for name, p in named_parameters if p.requires_grad]
    parameters, by_muon = [p for _, p in named], []
    if config.name == "Muon":
        by_muon = [p for name, p in named if p.ndim == 2 and not name.startswith(_ENDS)]
        parameters = [p for name, p in named if p.ndim != 2 or name.startswith(_ENDS)]
    groups: list[dict[str, Any]] = [{"params": parameters}]
    if not config.weight_decay_norms_and_biases:
        groups = [
            {"params": [p for p in parameters if p.ndim > 1]},
            {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
        ]
    groups = [
        group | {"params": group["params"][begin : begin + _MOST_IN_A_GROUP]}
        for group in groups
        for begin in range(0, len(group["params"]), _MOST_IN_A_GROUP)
    ]
    options: dict[str, Any] = {
        "lr": config.lr,
        "betas": (config.beta1, config.beta2),
        "eps": config.eps,
        "weight_decay": config.weight_decay,
        "fused": config.implementation == "fused",
        "foreach": config.implementation == "foreach",
    }
    if config.moments_dtype == "bfloat16":
        adamw: torch.optim.AdamW = BFloat16AdamW(groups, compile_ if compile_ and compile_.enable else None, **options)
    else:
        adamw = torch.optim.AdamW(groups, **options)
    return MuonAndAdamW(by_muon, adamw) if by_muon else adamw


@torch.no_grad()
def apply_update(
    optimizer: torch.optim.Optimizer, learning_rate: float, gradient_norm: Tensor, max_norm: float = float("inf")
) -> None:
    """One update at this rate with gradients scaled down to a norm of at most `max_norm`.

    Fused AdamW scales and updates in one pass, and leaves all as it is, on the device, where the norm is not finite.
    """
    divisor = ((gradient_norm + 1e-6) / max_norm).clamp(min=1.0)
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    if optimizer.defaults["fused"]:
        # What torch's GradScaler sets to make a fused optimizer divide or skip: no value ever travels to the host.
        optimizer.grad_scale = divisor  # type: ignore[attr-defined]
        optimizer.found_inf = (~gradient_norm.isfinite()).float()  # type: ignore[attr-defined]
    else:
        _divide_gradients(optimizer, divisor)
    optimizer.step()
    optimizer.zero_grad()


def update_in_backward(
    optimizer: torch.optim.Optimizer, note: Callable[[Tensor], None], learning_rate: Callable[[], float]
) -> None:
    """Have each parameter updated as soon as its gradient is there and noted; the gradient is freed at once.

    An update afterwards finds no gradients and does nothing.
    """

    def update(own_group: dict[str, Any], parameter: Tensor) -> None:
        assert parameter.grad is not None
        note(parameter.grad)
        _update_one(optimizer, own_group, parameter, learning_rate())

    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.register_post_accumulate_grad_hook(functools.partial(update, group))


def make_states(optimizer: torch.optim.Optimizer) -> None:
    """Create the states a first update would, by updates with zero gradients at a rate of 0 that are not counted."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        for parameter in group["params"].copy():
            parameter.grad = torch.zeros_like(parameter)
            _update_one(optimizer, group, parameter, 0.0)
    for state in optimizer.state.values():
        if "step" in state:
            state["step"].zero_()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def _update_one(
    optimizer: torch.optim.Optimizer, own_group: dict[str, Any], parameter: Tensor, learning_rate: float
) -> None:
    """An update of one parameter, whose gradient is freed."""
    everyone = [group["params"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["params"] = [parameter] if group is own_group else []
    apply_update(optimizer, learning_rate, torch.ones((), device=_local(parameter).device))
    for group, parameters in zip(optimizer.param_groups, everyone, strict=True):
        group["params"] = parameters


def _divide_gradients(optimizer: torch.optim.Optimizer, divisor: Tensor) -> None:
    gradients = [_local(p.grad) for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    if gradients:
        torch._foreach_div_(gradients, divisor.to(gradients[0].device))


class MuonAndAdamW(torch.optim.Optimizer):
    """Muon for the matrices within blocks, AdamW for the rest, at one learning rate and weight decay.

    Muon's updates are scaled to the size of AdamW's (arXiv:2502.16982).
    """

    def __init__(self, matrices: list[nn.Parameter], adamw: torch.optim.AdamW) -> None:
        options = adamw.defaults
        self.muon = torch.optim.Muon(
            matrices, lr=options["lr"], weight_decay=options["weight_decay"], adjust_lr_fn="match_rms_adamw"
        )
        self.adamw = adamw
        super().__init__([*self.muon.param_groups, *adamw.param_groups], options)
        self.muon.state = adamw.state = self.state  # as the groups are: a rate that is set here counts there

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        if self.defaults["fused"]:
            self.adamw.grad_scale, self.adamw.found_inf = self.grad_scale, self.found_inf  # type: ignore[attr-defined]
            _divide_gradients(self.muon, self.grad_scale)  # type: ignore[attr-defined]
        self.muon.step()
        self.adamw.step()


class BFloat16AdamW(torch.optim.AdamW):
    """AdamW with moments in bfloat16: half the memory of the optimizer.

    A change too small for bfloat16 is rounded up with the probability that keeps it on average, so that changes add
    up (arXiv:2010.06192). The draw is a hash of an element's place in the whole and the step: the same on all layouts.
    """

    def __init__(self, groups: list[dict[str, Any]], compile_: Compile | None, **options: Any) -> None:
        super().__init__(groups, **options)
        self._update: Callable[..., None] = _update
        self._elements: int | None = _ELEMENTS
        if compile_ is not None:  # one pass, with nothing in between
            self._update = torch.compile(_update, backend=compile_.backend, dynamic=True, fullgraph=True)
            self._elements = None

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        devices = [_local(p).device for group in self.param_groups for p in group["params"]]
        if not devices:  # the parameter that is updated in backward is Muon's
            return
        device = devices[0]
        scale = self.grad_scale.to(device)  # type: ignore[attr-defined]
        applies = 1.0 - self.found_inf.to(device)  # type: ignore[attr-defined]
        does_apply = applies.bool()
        for group in self.param_groups:
            rate = torch.tensor(group["lr"])  # a number would be compiled in
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["step"] = torch.zeros((), device=device)
                    state["exp_avg"] = torch.zeros_like(parameter, dtype=torch.bfloat16)
                    state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=torch.bfloat16)
                tensors = [_local(t) for t in (parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"])]
                state["step"] += applies
                for begin, piece in self._pieces(tensors):
                    self._update(
                        *piece,
                        _place(parameter, begin),
                        state["step"],
                        does_apply,
                        scale,
                        rate,
                        *group["betas"],
                        group["eps"],
                        group["weight_decay"],
                    )

    def _pieces(self, tensors: list[Tensor]) -> Iterator[tuple[int, list[Tensor]]]:
        """Some rows of each at a time, and the first one's number."""
        rows, columns = len(tensors[0]), tensors[0][:1].numel()
        size = rows if self._elements is None else max(1, self._elements // max(1, columns))
        for begin in range(0, rows if columns else 0, max(1, size)):
            yield begin, [tensor[begin : begin + size] for tensor in tensors]


def _update(
    parameter: Tensor,
    gradient: Tensor,
    mean: Tensor,
    mean_square: Tensor,
    place: tuple[int, int, int],
    step: Tensor,
    applies: Tensor,
    scale: Tensor,
    rate: Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> None:
    """What torch's AdamW does to one tensor, in place, or nothing."""
    gradient = gradient.float() / scale
    m = torch.lerp(gradient, mean.float(), beta1)
    v = torch.lerp(gradient.square(), mean_square.float(), beta2)
    denominator = (v / (1 - beta2**step)).sqrt() + eps
    changed = parameter.float() * (1 - rate * weight_decay) - rate / (1 - beta1**step) * m / denominator
    noise = _hash(_numbers(parameter, place) ^ _hash(step.int()))
    parameter.copy_(torch.where(applies, changed, parameter))
    mean.copy_(torch.where(applies, _round_at_random(m, noise & 0xFFFF), mean))
    mean_square.copy_(torch.where(applies, _round_at_random(v, (noise >> 16) & 0xFFFF), mean_square))


def _place(parameter: Tensor, begin: int) -> tuple[int, int, int]:
    """Of a matrix's shard from this row on: its first row and column in the whole, and the columns of the whole."""
    row, column = begin, 0
    if isinstance(parameter, DTensor):
        offsets = parameter.__create_chunk_list__()[0].offsets
        row, column = begin + offsets[0], offsets[1] if len(offsets) > 1 else 0
    return row, column, parameter.shape[1] if parameter.ndim > 1 else 1


def _numbers(shard: Tensor, place: tuple[int, int, int]) -> Tensor:
    """The number of each element in the whole parameter, as int32 that may wrap around."""
    row, column, columns = place
    rows = torch.arange(shard.shape[0], dtype=torch.int32, device=shard.device) + row
    if shard.ndim == 1:
        return rows
    return rows[:, None] * columns + (torch.arange(shard.shape[1], dtype=torch.int32, device=shard.device) + column)


def _hash(x: Tensor) -> Tensor:
    """32 bits that look drawn, of int32 (lowbias32 by C. Wellons); int32 has no shift that brings in zeros."""
    x = (x ^ ((x >> 16) & 0xFFFF)) * 0x7FEB352D
    x = (x ^ ((x >> 15) & 0x1FFFF)) * (0x846CA68B - (1 << 32))
    return x ^ ((x >> 16) & 0xFFFF)


def _round_at_random(x: Tensor, noise: Tensor) -> Tensor:
    """To bfloat16, up or down with the probability that makes it right on average."""
    bits = (x.view(torch.int32) + noise) & ~0xFFFF
    return bits.view(torch.float32).bfloat16()


def _local(tensor: Tensor) -> Tensor:
    """This rank's part; of a weight that FSDP gathers in float8, what torchao's wrapper holds."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return getattr(local, "_tensor", local)
