"""Compares the gradient of several samples at once with that of their parts, which a layout divides likewise."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from torchtitan.models.spec import ModelSpec
from torchtitan.own_model.derive import call_with, fix_for
from torchtitan.own_model.record import kept
from torchtitan.own_model.samples import own_draws
from torchtitan.own_model.step import as_counted, to_type
from torchtitan.own_model.trials.batches import ABOUT, Trials, fresh, say
from torchtitan.own_model.trials.first_samples import states
from torchtitan.refusal import Refusal, place_of


def check_gradient(spec: ModelSpec, model: nn.Module, trials: Trials, pieces: int, in_training: bool) -> None:
    """The gradient of all samples at once must be that of their parts: a loss may be a mean, and its gradient none.

    In training, where forward may mix samples; in evaluation if it then draws random numbers.
    """
    name, mode = "the step" if spec.step else "the loss", "in training" if in_training else "in evaluation"

    def totals() -> tuple[list[tuple[Tensor, Tensor]], bool]:
        found, before = [], states()
        for batch, count in zip(trials.batches[2:], trials.counts[2:], strict=True):
            inputs, target = fresh(batch)
            with kept(model):  # buffers that forward changes
                if spec.step is not None:
                    result = spec.step(model, inputs, target)
                else:
                    assert spec.loss is not None
                    result = spec.loss(to_type(call_with(model, inputs), torch.float32), target)
            found.append((as_counted(result, count), isinstance(result, tuple)))
        return [pair for pair, _ in found], states() != before or (found[0][1] and trials.dims is None)

    try:
        with own_draws("the gradient"), torch.enable_grad():
            (whole, *parts), cannot_tell = totals() if not in_training else _in_training(model, totals)
            if not whole[0].requires_grad:
                raise Refusal(
                    f"{name} of the ModelSpec gives no gradient to any weight; compute it from the model's output, "
                    "without detach, item or numpy"
                )
            (whole[0] / whole[1].clamp(min=1)).backward()
            norm = _norm(model)
            total, count = (torch.stack(each).sum() for each in zip(*parts, strict=True))
            (-total / count.clamp(min=1)).backward()
            rest = _norm(model)
    except Refusal:
        raise
    except Exception as error:
        raise Refusal(
            f"{name} of the ModelSpec fails in backward{place_of(error)}: {type(error).__name__}: {error}; "
            f"{fix_for(trials.batches, ABOUT)}"
        ) from None
    finally:
        model.zero_grad(set_to_none=True)
    if in_training and cannot_tell:
        return check_gradient(spec, model, trials, pieces, False)
    if cannot_tell or rest <= 1e-3 * norm + 1e-7 or not math.isfinite(norm):
        return
    said = (
        f"{name} of the ModelSpec, {mode}, gives {trials.counts[2]} samples at once a gradient that differs from that "
        f"of parts of {', '.join(map(str, trials.counts[3:]))} by {rest / norm:.1%}, so the loss or the model mixes or "
        "weights samples"
    )
    say(spec, said, pieces)


def _in_training(model: nn.Module, totals: Callable[[], Any]) -> Any:
    model.train()
    try:
        return totals()
    finally:
        model.eval()


def _norm(model: nn.Module) -> float:
    squares = [p.grad.double().square().sum() for p in model.parameters() if p.grad is not None]
    return float(sum(squares)) ** 0.5
