"""Tries a user's module on its first samples, on rank 0, before anything is laid out.

What would train another model than one process does is refused; what depends on the layout is logged once.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_leaves
from torch.utils.data import IterableDataset

from torchtitan.data.samples import collate, own_draws
from torchtitan.models.any.derive import Structure, as_arguments
from torchtitan.models.spec import ModelSpec
from torchtitan.observe.log import logger
from torchtitan.refusal import Refusal
from torchtitan.training.any.build import is_sharded
from torchtitan.training.any.step import as_counted, to_type
from torchtitan.training.run import Run


@dataclass(frozen=True)
class Changes:
    """What forward leaves behind in training."""

    parameters: list[str]
    buffers: list[str]  # under all their names
    of_the_batch: list[str]  # those of the buffers whose values depend on the samples, or on random numbers
    numbers: list[str]  # plain numbers that modules count in
    draws: bool  # random numbers


def first_samples(dataset: Any, is_seeded: bool) -> list[Any]:
    """The first two samples, or the one there is. Refuses a dataset that draws numbers which nothing seeds."""
    is_stream = isinstance(dataset, IterableDataset)
    with own_draws("one reading"):
        before, samples = _states(), list(islice(iter(dataset), 2))
        draws = _states() != before
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


def _are_equal(one: Any, other: Any) -> bool:
    def equal(a: Any, b: Any) -> bool:
        return torch.equal(a, b) if isinstance(a, torch.Tensor) else np.array_equal(a, b)

    leaves = tree_leaves(one), tree_leaves(other)
    return len(leaves[0]) == len(leaves[1]) and all(map(equal, *leaves))


def _states() -> tuple[Any, ...]:
    """The state of each generator on the host."""
    of_numpy = np.random.get_state(legacy=False)["state"]
    return random.getstate(), of_numpy["key"].tobytes(), of_numpy["pos"], torch.get_rng_state().numpy().tobytes()


def try_out(run: Run, model: nn.Module, known: Structure, samples: Sequence[Any]) -> frozenset[str]:
    """The names of the buffers that forward changes."""
    spec = run.blueprint.spec
    _check_loss(spec, model, samples[0], run)
    changes = find_changes(spec, model, samples)
    _check_state(model, changes, run)
    _check_draws(changes, known, run)
    _check_use(known, run)
    return frozenset(changes.buffers)


def find_changes(spec: ModelSpec, model: nn.Module, samples: Sequence[Any]) -> Changes:
    """Compare the module before and after forwards in training."""
    batches = [collate([sample, sample]) for sample in (samples[0], samples[-1])]  # two: a norm needs more than one
    was_training = model.training

    def pass_through(batch: Any, key: str) -> bool:
        with own_draws(key):
            before = _states()
            try:
                _run(spec, model.train(), *batch)
            except Exception as error:
                raise Refusal(
                    f"the model's forward fails in training, on the first sample twice: {type(error).__name__}: {error}"
                ) from error
            return _states() != before

    with torch.no_grad():
        sums, buffers, numbers = _sums(model), {name: b.clone() for name, b in _buffers(model)}, _numbers(model)
        versions = {name: (id(b), b._version) for name, b in _buffers(model)}
        draws = pass_through(batches[0], "one")
        # An iteration may have converged and write the same number; a norm writes without a new version.
        written = [name for name, b in _buffers(model) if (id(b), b._version) != versions.get(name)]
        changed = [name for name, b in _buffers(model) if name in written or not _equal(b, buffers[name])]
        parameters = [name for name, total in _sums(model).items() if not _equal(total, sums[name])]
        of_the_batch, counted = [], []
        if changed or _numbers(model) != numbers:
            numbers, after = _numbers(model), {name: b.clone() for name, b in _buffers(model) if name in changed}
            for name, buffer in _buffers(model):
                buffer.copy_(buffers[name])
            pass_through(batches[1], "another")
            of_the_batch = [name for name, b in _buffers(model) if name in after and not _equal(b, after[name])]
            counted = [name for name, number in _numbers(model).items() if number != numbers.get(name, number)]
            for name, buffer in _buffers(model):
                buffer.copy_(buffers[name])
    model.train(was_training)
    return Changes(parameters, changed, of_the_batch, counted, draws)


def _run(spec: ModelSpec, model: nn.Module, inputs: Any, target: Any) -> None:
    if spec.step is not None:
        with torch.enable_grad():  # a step may need gradients on its way
            spec.step(model, inputs, target)
    else:
        args, kwargs = as_arguments(inputs)
        model(*args, **kwargs)


def _buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return model.named_buffers(remove_duplicate=False)


def _sums(model: nn.Module) -> dict[str, Tensor]:
    """A number for each parameter: a copy of a large model would take too much memory."""
    return {name: parameter.double().sum() for name, parameter in model.named_parameters()}


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and bool(((one == other) | ((one != one) & (other != other))).all())


def _numbers(model: nn.Module) -> dict[str, float]:
    kinds = (int, float)
    return {
        f"{name}.{key}".lstrip("."): value
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if type(value) in kinds
    }


def check_norms(model: nn.Module, run: Run) -> None:
    """Refuse norms over a batch where the layout divides it; the trial of the others needs a batch of one."""
    pieces = _pieces(run)[0]
    for name, module in model.train().named_modules():
        if isinstance(module, _BatchNorm) and pieces > 1 and (module.training or module.running_mean is None):
            is_synced = isinstance(module, nn.SyncBatchNorm)
            if is_synced and run.dims.pp == 1 and run.batch.num_local_batches == 1:
                continue
            raise Refusal(
                f"{name} is a {type(module).__name__}, whose numbers depend on the batch, and this layout divides a "
                f"batch into {pieces} pieces, so it would train another model than one process; use GroupNorm or "
                "LayerNorm, keep it in evaluation mode, run a pipeline with the schedule GPipe and microbatches as "
                "large as the batch, or on GPUs with data parallelism alone nn.SyncBatchNorm.convert_sync_batchnorm "
                "in build"
            )


def _check_state(model: nn.Module, changes: Changes, run: Run) -> None:
    """Refuse state that depends on how a batch is divided, and state that no checkpoint could hold."""
    pieces, own_pieces = _pieces(run)
    for name, module in model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            raise Refusal(
                f"{name or 'the model'}, a {type(module).__name__}, keeps a state of its own (get_extra_state), which "
                "is no tensor, and a checkpoint would not hold it; keep it in buffers"
            )
    if changes.of_the_batch and pieces > 1:
        raise Refusal(
            f"forward changes the buffer {changes.of_the_batch[0]} by the samples it sees, and this layout divides a "
            f"batch into {pieces} pieces, so it would train another model than one process; use a layout that does not"
        )
    if changes.parameters and is_sharded(run.config, run.mesh):
        raise Refusal(
            f"forward changes the parameter {changes.parameters[0]}, and FSDP would forget the change; make it a buffer"
        )
    if changes.buffers and own_pieces > 1:
        logger.info(
            f"forward changes the buffer {changes.buffers[0]}, and a step calls it {own_pieces} times here, so this "
            "buffer will not be as in one process"
        )
    if changes.numbers:
        logger.info(
            f"forward changes {changes.numbers[0]}, a plain number: no checkpoint holds it, and a recompute changes it "
            "again; make it a buffer"
        )


def _pieces(run: Run) -> tuple[int, int]:
    """Into how many pieces a global batch is divided, and how many of them a rank takes through the model."""
    own = run.batch.num_local_batches
    if run.dims.pp > 1:
        own *= run.config.training.local_batch_size // run.config.parallelism.pipeline_parallel_microbatch_size
    return run.dims.dp * own, own


def _check_draws(changes: Changes, known: Structure, run: Run) -> None:
    if not changes.draws:
        return
    recompute = run.config.activation_checkpoint
    if recompute.mode == "memory_budget" and recompute.memory_budget < 1:
        raise Refusal(
            'activation_checkpoint.mode = "memory_budget", but the model draws random numbers (dropout does), and with '
            "a budget the compiler draws others when it recomputes, so that gradients would be wrong "
            '(https://github.com/pytorch/pytorch/issues/190758); use "selective" or "full"'
        )
    is_recomputed = recompute.mode in ("full", "selective") and any(part.kind == "layer" for part in known.parts)
    if is_recomputed and not recompute.preserve_rng_state:
        raise Refusal(
            "activation_checkpoint.preserve_rng_state = false, but the model draws random numbers, and a recompute "
            "would draw others than the first pass; set it to true"
        )
    if run.place.world_size > 1:
        logger.info(
            "the model draws random numbers (dropout does): they depend on the seed, the step and the rank's place, so "
            "this run repeats to the bit on this layout, and another layout draws others"
        )


def _check_use(known: Structure, run: Run) -> None:
    """Refuse a compiler that would have nothing to compile."""
    if run.config.compile.model and not any(part.kind == "layer" for part in known.parts):
        raise Refusal(
            "compile.enable = true compiles layers, and the model names none; give its ModelSpec layers = the name of "
            'its list of layers, or set compile.components = ["loss"]'
        )


def _check_loss(spec: ModelSpec, model: nn.Module, sample: Any, run: Run) -> None:
    """The loss and the metrics of a sample, and of the sample twice: a mean stays, a sum doubles."""
    was_training = model.training
    functions: dict[str, Callable[[Any, Any], Any]] = {f"the metric {n}": m for n, m in spec.metrics.items()}
    if spec.loss is not None and spec.step is None:
        functions = {"the loss": spec.loss} | functions
    once, twice = collate([sample]), collate([sample, sample])
    with own_draws("the loss"), torch.no_grad():
        if spec.step is not None:
            step = partial(spec.step, model.eval())
            _judge("the step", step(*once), step(*twice), run)
        outputs = []
        for inputs, _ in (once, twice) if functions else ():
            args, kwargs = as_arguments(inputs)
            outputs.append(to_type(model.eval()(*args, **kwargs), torch.float32))
        for name, function in functions.items():
            _judge(name, function(outputs[0], once[1]), function(outputs[1], twice[1]), run)
    model.train(was_training)


def _judge(name: str, once: Any, twice: Any, run: Run) -> None:
    means = []
    for result in (once, twice):
        of_pair = "the first of its pair is" if isinstance(result, tuple) else "it returns"
        first = result[0] if isinstance(result, tuple) else result
        if not isinstance(first, Tensor) or first.numel() != 1:
            shape = list(first.shape) if isinstance(first, Tensor) else type(first).__name__
            raise Refusal(
                f"{name} of the ModelSpec gives no tensor of one number: {of_pair} {shape}; return a mean over "
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
    if _pieces(run)[0] > 1:
        logger.info(
            f"{name} is {one:.4g} for one sample and {two:.4g} for the same sample twice: it is no mean over samples, "
            "so it depends on how a batch is divided, and will not be as in one process"
        )
