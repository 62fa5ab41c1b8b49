"""Mixtures of experts as plain modules: they know torch and a shape, no device, no process group, no config.

No token is dropped: the tokens are sorted by their experts, and each expert multiplies its own rows, however many.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial

from torchtitan.models.experts.args import ExpertArgs
from torchtitan.models.layers import FeedForward


class Router(nn.Module):
    """Chooses the experts of each token, and says how much each of them counts; in float32."""

    def __init__(self, args: ExpertArgs) -> None:
        super().__init__()
        self.args = args
        self.weight = nn.Parameter(torch.empty(args.num_experts, args.dim))
        # Follows the load after each update (experts/load.py), and decides with the scores who is chosen.
        self.bias: nn.Parameter | None = None
        if args.balance == "bias":
            self.bias = nn.Parameter(torch.empty(args.num_experts), requires_grad=False)
            self.bias.is_kept_whole = True  # type: ignore[attr-defined]  # or it would be rounded

    def _apply(self, fn: Any, recurse: bool = True) -> "Router":
        """Keep the bias in float32 whatever the weights become: 16 bits would round its small steps away."""
        super()._apply(fn, recurse)
        if self.bias is not None:
            self.bias.data = self.bias.data.float()
        return self

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of tokens [N, C]: weights and numbers of their experts [N, K], and the scores of all [N, E]."""
        logits = F.linear(tokens.float(), local(self.weight).float())
        scores = logits.softmax(-1) if self.args.score == "softmax" else logits.sigmoid()
        chosen = self._choose(scores.detach())
        weights = scores.gather(-1, chosen)
        if self.args.normalizes:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights * self.args.score_scale, chosen, scores

    def _choose(self, scores: Tensor) -> Tensor:
        if self.bias is not None:
            scores = scores + local(self.bias).float()
        if self.args.num_groups > 1:  # a group counts as much as its two best experts (arXiv:2412.19437)
            groups = scores.unflatten(-1, (self.args.num_groups, -1))
            best = groups.topk(min(2, groups.shape[-1]), -1).values.sum(-1)
            kept = torch.zeros_like(best, dtype=torch.bool)
            kept = kept.scatter(-1, best.topk(self.args.groups_per_token, -1).indices, True)
            scores = groups.masked_fill(~kept.unsqueeze(-1), -torch.inf).flatten(-2)
        return scores.topk(self.args.experts_per_token, -1).indices


class Experts(nn.Module):
    """SwiGLU networks, stacked: expert e has w1[e], w2[e] and w3[e]."""

    def __init__(self, args: ExpertArgs) -> None:
        super().__init__()
        inward, outward = (args.num_experts, args.hidden_dim, args.dim), (args.num_experts, args.dim, args.hidden_dim)
        self.w1 = nn.Parameter(torch.empty(inward))
        self.w2 = nn.Parameter(torch.empty(outward))
        self.w3 = nn.Parameter(torch.empty(inward))

    def forward(self, rows: Tensor, ends: Tensor) -> Tensor:
        """Of rows sorted by expert [M, C]; those of this module's expert e end before `ends[e]`."""
        w1, w2, w3 = (local(weight) for weight in (self.w1, self.w2, self.w3))
        return grouped(F.silu(grouped(rows, w1, ends)) * grouped(rows, w3, ends), w2, ends)


def grouped(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Each row [M, in] times the matrix of its expert, of [E, out, in]."""
    # torch's product wants rows of whole 16 bytes. It needs no value on the host, as the loop does.
    if not hasattr(torch, "_grouped_mm") or any(size * weights.element_size() % 16 for size in weights.shape[1:]):
        return grouped_by_loop(rows, weights, ends)
    # Its description for the compiler knows bfloat16 alone.
    product = torch._grouped_mm if rows.dtype == torch.bfloat16 else torch.compiler.disable(torch._grouped_mm)
    found: Tensor = product(rows, weights.transpose(-2, -1), offs=ends)
    return found


@torch.compiler.disable
def grouped_by_loop(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    stops = ends.tolist()
    parts = (rows[begin:end] for begin, end in zip([0, *stops], stops, strict=False))
    return torch.cat([F.linear(part, weight) for part, weight in zip(parts, weights, strict=True)])


class MixtureOfExperts(nn.Module):
    """A feed-forward network of which each token uses a few experts, and all tokens the shared ones."""

    counts: Tensor  # choices of each expert since the last update
    before: Tensor  # those of the last update's global batch

    def __init__(self, args: ExpertArgs) -> None:
        super().__init__()
        self.router, self.experts = Router(args), Experts(args)
        width = args.num_shared_experts * args.hidden_dim
        self.shared = FeedForward(args.dim, width) if width else None
        for name in ("counts", "before"):
            self.register_buffer(name, torch.zeros(args.num_experts, dtype=torch.int64), persistent=False)
        # The balancing loss, a mean over layers, is this times a sum over experts: their share of choices, times the
        # mean of their scores (arXiv:2101.03961).
        self.coefficient = args.balance_rate * args.num_experts / args.num_mixtures if args.balance == "loss" else 0.0
        self.batch_tokens = 0  # of a global batch; 0: not trained, so nothing is balanced
        self.loss_scale: Any = None
        # Has the experts, wherever they are, take their rows; (experts, rows, ends) -> rows
        self.exchange: Callable[[Experts, Tensor, Tensor], Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)  # [N, C]
        weights, chosen, scores = self.router(tokens)
        experts, order = chosen.flatten().sort(stable=True)
        every = torch.arange(len(self.counts), device=x.device)
        ends = torch.searchsorted(experts, every, right=True)
        if torch.is_grad_enabled():
            self.counts.add_(ends.diff(prepend=ends.new_zeros(1)))
            if self.coefficient and self.batch_tokens:
                factor = None if self.loss_scale is None else self.loss_scale.factor
                weights = _AddLoss.apply(weights, self.balancing_loss(scores), factor)
        place = torch.empty_like(order)
        place[order] = torch.arange(len(order), device=x.device)
        if self.exchange is None and x.device.type == "cpu" and x.element_size() == 2:
            order, place, ends = round_up(order, place, ends, chosen.flatten())
        rows = _Spread.apply(tokens, order, place, chosen.shape[1])  # [N * K, C]
        ends = ends.int()
        rows = self.experts(rows, ends) if self.exchange is None else self.exchange(self.experts, rows, ends)
        rows = _Collect.apply(rows, order, place).unflatten(0, chosen.shape)  # [N, K, C]
        out = (rows * weights.to(rows.dtype).unsqueeze(-1)).sum(1).view(x.shape)
        return out if self.shared is None else out + self.shared(x)

    def balancing_loss(self, scores: Tensor) -> Tensor:
        """What these tokens add to the balancing loss of the global batch.

        The share of choices is that of the last update's global batch. So no layout changes the loss: within a batch,
        the share would be known only after the last of its local batches.
        """
        share = self.before / self.batch_tokens
        part = scores / scores.sum(-1, keepdim=True)
        return self.coefficient / self.batch_tokens * (part @ share.to(part.dtype)).sum()


_MULTIPLE = 32


def round_up(order: Tensor, place: Tensor, ends: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Let an expert's rows be a multiple of 32: to multiply 16 bits, a CPU compiles a program for each number of rows.

    The rows between are the first token's. Nobody collects them, so their gradient is 0.
    """
    if len(order) < 4 * _MULTIPLE * len(ends):  # they would be many beside the others
        return order, place, ends
    counts = ends.diff(prepend=ends.new_zeros(1))
    rounded = (counts + _MULTIPLE - 1) // _MULTIPLE * _MULTIPLE
    stops = rounded.cumsum(0)
    place = place + (stops - rounded - ends + counts)[chosen]
    longer = order.new_zeros(len(order) + _MULTIPLE * len(ends))
    longer[place] = torch.arange(len(order), device=order.device)
    return longer, place, stops


class _AddLoss(torch.autograd.Function):
    """Passes a tensor on, and has backward begin at another loss, too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, factor: Tensor | None) -> Tensor:
        ctx.save_for_backward(torch.ones_like(loss) if factor is None else factor.to(loss.dtype))
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        return gradient, ctx.saved_tensors[0], None


class _Spread(torch.autograd.Function):
    """A row for each choice of a token, sorted by expert. Backward adds a token's rows in one order on any device."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, order: Tensor, place: Tensor, choices: int) -> Tensor:
        ctx.save_for_backward(place)
        ctx.choices = choices
        return tokens[order // choices]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        (place,) = ctx.saved_tensors
        return gradient[place].unflatten(0, (-1, ctx.choices)).sum(1), None, None, None


class _Collect(torch.autograd.Function):
    """The rows in the order of the tokens again."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, place: Tensor) -> Tensor:
        ctx.save_for_backward(order, place)
        ctx.num_rows = len(rows)
        return rows[place]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        order, place = ctx.saved_tensors
        if len(order) == len(place):
            return gradient[order], None, None
        return gradient.new_zeros(ctx.num_rows, gradient.shape[1]).index_copy_(0, place, gradient), None, None


def local(weight: Tensor) -> Tensor:
    """This rank's part of a weight; where all ranks have it whole, their gradients are summed."""
    if not isinstance(weight, DTensor):
        return weight
    if any(placement.is_shard() for placement in weight.placements):
        return weight.to_local()
    # A redistribution to what it is already: forward does nothing, backward sums.
    return weight.redistribute(placements=weight.placements).to_local(grad_placements=[Partial()])
