"""Reads the first samples and tries the loss on them: does the dataset draw unseeded, and is each mean a mean?"""

import functools
import random
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import IterableDataset

from torchtitan.models.spec import ModelSpec
from torchtitan.observe.log import logger
from torchtitan.own_model.derive import as_arguments
from torchtitan.own_model.forms import sizes_of
from torchtitan.own_model.samples import collate_of, own_draws
from torchtitan.own_model.step import as_counted, to_type
from torchtitan.refusal import Refusal, place_of

LOOKED_AT = 64  # samples, to find out how sizes vary


def first_samples(dataset: Any, is_seeded: bool) -> list[Any]:
    """The first two samples, or the one there is. Refuses a dataset that draws numbers which nothing seeds."""
    is_stream = isinstance(dataset, IterableDataset)
    with own_draws("one reading"):
        before, samples = states(), list(islice(iter(dataset), 2))
        draws = states() != before
    if not samples:
        raise Refusal(f"the dataset, a {type(dataset).__name__}, has no samples; correct the `data` of the ModelSpec")
    if draws and (is_stream or not is_seeded):
        with own_draws("another reading"):
            again = list(islice(iter(dataset), 2))
        if not _are_equal(samples, again):
            fix = "set data_is_random = True in the ModelSpec, which seeds them by epoch and sample"
            if is_stream:
                fix = "seed them in its __iter__, because each rank reads the whole stream"
            raise Refusal(
                f"the dataset, a {type(dataset).__name__}, draws random numbers when it reads a sample, so no two runs "
                f"would train on the same; {fix}"
            )
    return samples


def batches_of_many_sizes(dataset: Any, samples: Sequence[Any], spec: ModelSpec) -> list[tuple[Any, Any]]:
    """A batch of two samples, one of three, and, where collate pads, up to three more whose inputs have other sizes."""
    collate, several = collate_of(spec), [samples[0], samples[-1], samples[0]]
    batches = [collate(several[:count]) for count in (2, 3)]
    if spec.collate is None:
        return batches
    with own_draws("sizes"):
        if isinstance(dataset, IterableDataset):
            others = list(islice(iter(dataset), LOOKED_AT))
        else:
            others = [dataset[index] for index in range(0, len(dataset), 1 + len(dataset) // LOOKED_AT)]
    for sample in others:
        if all(sizes_of(collate([sample, sample])[0]) != sizes_of(inputs) for inputs, _ in batches):
            batches.append(collate([sample, sample]))
    return batches[:5]


def check_collate(collate: Callable[[Sequence[Any]], Any], samples: Sequence[Any]) -> None:
    with own_draws("a batch"):
        before = states()
        collate(samples)
        if states() != before:
            raise Refusal(
                "collate of the ModelSpec draws random numbers, which nothing seeds, so no two runs would train on the "
                "same; draw in the dataset, or mix samples in a step"
            )


def _are_equal(one: Any, other: Any) -> bool:
    def equal(a: Any, b: Any) -> bool:
        return torch.equal(a, b) if isinstance(a, torch.Tensor) else np.array_equal(a, b)

    leaves = tree_leaves(one), tree_leaves(other)
    return len(leaves[0]) == len(leaves[1]) and all(map(equal, *leaves))


def states() -> tuple[Any, ...]:
    """The state of each generator on the host."""
    of_numpy = np.random.get_state(legacy=False)["state"]
    return random.getstate(), of_numpy["key"].tobytes(), of_numpy["pos"], torch.get_rng_state().numpy().tobytes()


def check_loss(spec: ModelSpec, model: nn.Module, sample: Any, pieces: int, on_cpu: bool) -> None:
    """The loss and the metrics of a sample, and of the sample twice: a mean stays, a sum doubles."""
    was_training = model.training
    if isinstance(spec.loss, nn.Module) and (names := [name for name, _ in spec.loss.named_parameters()]):
        raise Refusal(
            f"the loss of the ModelSpec has parameters ({names[0]}), which no optimizer would train; keep them in the "
            "model, and let its output hold what the loss needs"
        )
    functions: dict[str, Callable[[Any, Any], Any]] = {f"the metric {n}": m for n, m in spec.metrics.items()}
    if spec.loss is not None and spec.step is None:
        functions = {"the loss": spec.loss} | functions
    collate = collate_of(spec)
    batches = collate([sample]), collate([sample, sample])
    if spec.step is not None:
        functions = {"the step": lambda inputs, target: spec.step(model.eval(), inputs, target)} | functions

    @functools.cache
    def output_of(number: int) -> Any:
        args, kwargs = as_arguments(batches[number][0])
        return to_type(model.eval()(*args, **kwargs), torch.float32)

    for name, function in functions.items():
        try:
            with own_draws("the loss"), torch.no_grad():
                results = [
                    function(inputs if name == "the step" else output_of(number), target)
                    for number, (inputs, target) in enumerate(batches)
                ]
        except Exception as error:
            if on_cpu:
                raise Refusal(
                    f"{name} of the ModelSpec fails on the first sample{place_of(error)}: {type(error).__name__}: "
                    f"{error}; it gets the model's output and the sample's target, as batches"
                ) from None
            # it may hold tensors on a GPU
            logger.info(f"{name} cannot be tried on a CPU before training ({type(error).__name__}: {error})")
            continue
        _judge(name, results, pieces)
    if on_cpu:
        _check_gradient(spec, model, batches[0])
    model.train(was_training)


def _check_gradient(spec: ModelSpec, model: nn.Module, batch: Any) -> None:
    with own_draws("the loss"), torch.enable_grad():
        if spec.step is not None:
            result = spec.step(model, *batch)
        else:
            assert spec.loss is not None
            args, kwargs = as_arguments(batch[0])
            result = spec.loss(to_type(model(*args, **kwargs), torch.float32), batch[1])
    if not (result[0] if isinstance(result, tuple) else result).requires_grad:
        raise Refusal(
            f"the {'step' if spec.step else 'loss'} of the ModelSpec gives no gradient to any weight; compute it from "
            "the model's output, without detach, item or numpy"
        )


def _judge(name: str, results: Sequence[Any], pieces: int) -> None:
    means = []
    for result in results:
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
        total, count = as_counted(result, 1)
        means.append(float(total) / max(1.0, float(count)))
    one, two = means
    if abs(two - one) <= 1e-3 * abs(one) + 1e-7:
        return
    if abs(two - 2 * one) <= 1e-3 * abs(one):
        raise Refusal(
            f"{name} of the ModelSpec is {one:.4g} for one sample and {two:.4g} for the same sample twice, so it is a "
            "sum, where a mean over samples is expected; return the mean, or a pair: the sum, and how many it is over"
        )
    if abs(2 * two - one) <= 1e-3 * abs(one):
        raise Refusal(
            f"{name} of the ModelSpec is {one:.4g} for one sample and {two:.4g} for the same sample twice, so it is "
            "divided by the number of samples once too often; return a mean, or a pair: a sum, and how many it is over"
        )
    if pieces > 1:
        logger.info(
            f"{name} is {one:.4g} for one sample and {two:.4g} for the same sample twice: it is no mean over samples, "
            "so it depends on how a batch is divided, and will not be as in one process"
        )
