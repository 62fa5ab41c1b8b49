"""Tries the loss, the step and the metrics on a few samples: is each a mean over samples, however they are divided?

A mean that leaves elements out, weights them, or compares the samples of a batch would depend on the layout.
"""

import functools
import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from torchtitan.models.spec import ModelSpec
from torchtitan.observe.log import logger
from torchtitan.own_model.derive import call_with, fix_for
from torchtitan.own_model.forms import sizes_of
from torchtitan.own_model.record import kept, leaves_of, map_leaves
from torchtitan.own_model.samples import collate_of, own_draws
from torchtitan.own_model.step import as_counted, to_type
from torchtitan.own_model.trials.batches import ABOUT, Trials, fresh, move_weights, parts_of, say
from torchtitan.own_model.trials.first_samples import states
from torchtitan.refusal import Refusal, place_of


def check_means(
    spec: ModelSpec, model: nn.Module, samples: Sequence[Any], trials: Trials, pieces: int, on_cpu: bool
) -> bool:
    """Whether all are means. `pieces`: into how many the layout divides a global batch."""
    if isinstance(spec.loss, nn.Module) and (names := [name for name, _ in spec.loss.named_parameters()]):
        raise Refusal(
            f"the loss of the ModelSpec has parameters ({names[0]}), which no optimizer would train; keep them in the "
            "model, and let its output hold what the loss needs"
        )
    is_mean = True
    move_weights(model.eval())

    @functools.cache
    def output_of(number: int) -> Any:
        before, output = states(), to_type(call_with(model, fresh(trials.batches[number][0])), torch.float32)
        trials.drawn.extend([number] * (states() != before))
        return output

    if spec.metrics_of_all:
        with torch.no_grad(), kept(model):
            _check_joining([(output_of(number), batch[1]) for number, batch in enumerate(trials.batches)])
    for name, function in _functions(spec, model, trials, output_of).items():
        results: list[Any] = []
        try:
            with own_draws("the loss"), torch.no_grad():
                before = states()
                for number in range(len(trials.batches)):
                    with kept(model):  # buffers that forward changes
                        results.append(function(number))
                draws = states() != before or trials.drawn
        except Exception as error:
            where = "on the first sample" if len(results) < 2 else f"on {trials.counts[len(results)]} samples"
            if on_cpu:
                raise Refusal(
                    f"{name} of the ModelSpec fails {where}{place_of(error)}: {type(error).__name__}: "
                    f"{error}; {fix_for(trials.batches, ABOUT)}"
                ) from None
            # it may hold tensors on a GPU
            logger.info(f"{name} cannot be tried on a CPU before training ({type(error).__name__}: {error})")
            continue
        for result in results[:2]:
            _check_kind(name, result)
        if draws:
            logger.info(
                f"{name} or the model draws random numbers, so the run cannot try whether it is a mean over samples; "
                "if it leaves elements out or weights them, return a pair: a sum, and how many it is over"
            )
            continue
        _check_doubling(name, results)
        if not _check_division(spec, name, results[2:], trials, pieces):
            is_mean = False
        elif name != "the step":
            _try_other_labels(spec, name, trials, output_of, pieces)
        if pieces > 1 and spec.collate is not None and not trials.drawn:
            _check_padding(spec, model, name, samples, results[2], trials)
    return is_mean


Outputs = Callable[[int], Any]  # the model's, of the batch with this number


def _functions(
    spec: ModelSpec, model: nn.Module, trials: Trials, output_of: Outputs
) -> dict[str, Callable[[int], Any]]:
    """What is to be a mean, each as a function of the number of a batch."""
    step = spec.step

    def of_output(function: Callable[[Any, Any], Any]) -> Callable[[int], Any]:
        return lambda number: function(output_of(number), trials.batches[number][1])

    functions = {name: of_output(function) for name, function in _of_output(spec).items()}
    return functions if step is None else {"the step": lambda n: step(model, *fresh(trials.batches[n]))} | functions


def _of_output(spec: ModelSpec) -> dict[str, Callable[[Any, Any], Any]]:
    functions = {f"the metric {name}": metric for name, metric in spec.metrics.items()}
    return functions if spec.step is not None or spec.loss is None else {"the loss": spec.loss} | functions


@torch.no_grad()
def _try_other_labels(spec: ModelSpec, name: str, trials: Trials, output_of: Outputs, pieces: int) -> None:
    """The same with each sample's class moved on, so that classes count which are rare in the data."""
    inputs, targets = trials.batches[2]
    leaves = [leaf for leaf in leaves_of(output_of(2))[0] if isinstance(leaf, Tensor) and leaf.dim() > 1]
    classes = min((size for leaf in leaves for size in (leaf.shape[1], leaf.shape[-1])), default=0)
    if trials.dims is None or classes < 2:
        return
    dims = iter(trials.dims[len(leaves_of(inputs)[0]) :])

    def moved(leaf: Any) -> Any:
        dim = next(dims)
        if dim is None or leaf.is_floating_point() or leaf.dtype == torch.bool:
            return leaf
        numbers = torch.arange(leaf.shape[dim]).view([-1 if d == dim else 1 for d in range(leaf.dim())])
        return torch.where((leaf >= 0) & (leaf < classes), (leaf + numbers) % classes, leaf)

    whole, function = (inputs, map_leaves(moved, targets)), _of_output(spec)[name]
    pairs = [whole, *parts_of(whole, trials.dims, trials.counts[3:])]
    try:
        results = [function(output_of(number), target) for number, (_, target) in enumerate(pairs, 2)]
    except Exception:  # it takes no other labels than those of the data
        return
    _check_division(spec, name, results, trials, pieces, " with the samples' classes exchanged")


def _check_joining(pairs: Sequence[Any]) -> None:
    """The outputs and targets of all batches are joined along their first dimension."""
    for a, b in zip(leaves_of(pairs[0])[0], leaves_of(pairs[1])[0], strict=False):
        if isinstance(b, Tensor) and a.shape != b.shape and a.shape[:1] == b.shape[:1]:
            raise Refusal(
                "metrics_of_all of the ModelSpec gets the outputs and targets of all batches, joined along their first "
                f"dimension, and one of size {list(b.shape)} for two samples does not count them there; put the "
                "samples first, or leave metrics_of_all out"
            )


def _check_kind(name: str, result: Any) -> None:
    of_pair = "the first of its pair is" if isinstance(result, tuple) else "it returns"
    first = result[0] if isinstance(result, tuple) else result
    if not isinstance(first, Tensor) or first.numel() != 1:
        shape = list(first.shape) if isinstance(first, Tensor) else type(first).__name__
        raise Refusal(
            f"{name} of the ModelSpec gives no tensor of one number: {of_pair} {shape}; return a mean over "
            "samples, or a pair: a sum, and how many it is over"
        )
    if first is result and not first.is_floating_point():
        raise Refusal(
            f"{name} of the ModelSpec returns the whole number {int(first)}, which is no mean; return a mean over "
            "samples, or a pair: a sum, and how many it is over"
        )


def _mean(pairs: Sequence[tuple[Tensor, Tensor]]) -> float:
    return sum(float(total) for total, _ in pairs) / max(1.0, sum(float(count) for _, count in pairs))


def _check_doubling(name: str, results: Sequence[Any]) -> None:
    """A mean stays the same for a sample twice, and a sum doubles, as it adds up over parts. A pair that counts
    nothing of this sample tells nothing.
    """
    pairs = [as_counted(result, 1) for result in results]
    one, two, whole, *parts = (_mean([pair]) for pair in pairs)
    if abs(two - one) <= 1e-3 * abs(one) + 1e-7 or float(pairs[0][1]) == 0:
        return
    if abs(two - 2 * one) <= 1e-3 * abs(one) and abs(whole - sum(parts)) <= 1e-3 * sum(map(abs, parts)):
        raise Refusal(
            f"{name} of the ModelSpec is {one:.4g} for one sample and {two:.4g} for the same sample twice, so it is a "
            "sum, where a mean over samples is expected; return the mean, or a pair: the sum, and how many it is over"
        )
    if abs(2 * two - one) <= 1e-3 * abs(one):
        raise Refusal(
            f"{name} of the ModelSpec is {one:.4g} for one sample and {two:.4g} for the same sample twice, so it is "
            "divided by the number of samples once too often; return a mean, or a pair: a sum, and how many it is over"
        )


def _check_division(
    spec: ModelSpec, name: str, results: Sequence[Any], trials: Trials, pieces: int, how: str = ""
) -> bool:
    """All samples at once must give what their parts do, each weighted by what it counts."""
    if isinstance(results[0], tuple) and trials.dims is None:
        return True  # its parts have less padding, by which the model itself may differ
    whole, *parts = (as_counted(*pair) for pair in zip(results, trials.counts[2:], strict=True))
    at_once, divided = _mean([whole]), _mean(parts)
    scale = max([abs(at_once), *(abs(_mean([part])) for part in parts)])
    if abs(at_once - divided) <= 1e-4 * scale + 1e-7 or math.isnan(at_once):
        return True
    said = (
        f"{name} of the ModelSpec{how} is {at_once:.5g} for {trials.counts[2]} samples at once and {divided:.5g} as "
        f"the mean of parts of {', '.join(map(str, trials.counts[3:]))}, so it is no mean over samples"
    )
    say(spec, said, pieces)
    return False


@torch.no_grad()
def _check_padding(
    spec: ModelSpec, model: nn.Module, name: str, samples: Sequence[Any], at_once: Any, trials: Trials
) -> None:
    """Say if the numbers depend on how far collate pads, which they do where padding is neither masked nor left out."""
    sizes, collate = trials.counts[3:], collate_of(spec)
    parts = [collate(samples[end - size : end]) for size, end in zip(sizes, accumulate(sizes), strict=True)]
    if trials.dims is None or list(map(sizes_of, parts)) == list(map(sizes_of, trials.batches[3:])):
        return
    own = trials._replace(batches=[*trials.batches[:3], *parts])

    def output_of(number: int) -> Any:
        return to_type(call_with(model, fresh(own.batches[number][0])), torch.float32)

    function = _functions(spec, model, own, output_of)[name]
    found = []
    for number, size in enumerate(sizes, 3):
        with own_draws("the loss"), kept(model):
            found.append(as_counted(function(number), size))
    whole, divided = _mean([as_counted(at_once, trials.counts[2])]), _mean(found)
    if abs(whole - divided) > 1e-4 * abs(whole) + 1e-7:
        logger.warning(
            f"{name} of the ModelSpec is {whole:.5g} for {trials.counts[2]} samples that collate pads together and "
            f"{divided:.5g} for the same in parts, so it depends on how far collate pads, and each local batch and "
            "rank pads for itself: this run will not be as in one process. Leave the padding out of the loss, hide it "
            "from the model by a mask, or pad all batches to one length"
        )
