"""Tries a user's module on its first samples, on rank 0, before anything is laid out.

What would train another model than one process does is refused; what depends on the layout is logged once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_leaves

from torchtitan.models.own import Structure
from torchtitan.models.spec import ModelSpec
from torchtitan.observe.log import logger
from torchtitan.own_model.build import is_sharded
from torchtitan.own_model.derive import call_with
from torchtitan.own_model.samples import collate_of, own_draws
from torchtitan.own_model.trials.batches import make_trials
from torchtitan.own_model.trials.first_samples import states
from torchtitan.own_model.trials.gradient import check_gradient
from torchtitan.own_model.trials.means import check_means
from torchtitan.refusal import Refusal, place_of
from torchtitan.training.run import Run


@dataclass(frozen=True)
class Changes:
    """What forward leaves behind in training."""

    parameters: list[str]
    buffers: list[str]  # under all their names; not those that are written once
    of_the_batch: list[str]  # those of the buffers whose values depend on the samples, or on random numbers
    numbers: list[str]  # plain numbers that modules count in
    draws: bool  # random numbers


def try_out(run: Run, spec: ModelSpec, model: nn.Module, known: Structure, samples: Sequence[Any]) -> frozenset[str]:
    """The names of the buffers that forward changes."""
    changes = find_changes(spec, model, samples)
    trials, pieces, on_cpu, mode = make_trials(spec, samples), _pieces(run)[0], run.device.type == "cpu", model.training
    in_training = pieces > 1 and not (changes.numbers or changes.draws)  # a batch that is whole may be mixed
    if changes.parameters:
        logger.info("the run cannot try whether the loss is a mean over samples, because forward changes parameters")
    elif check_means(spec, model, samples, trials, pieces, on_cpu) and on_cpu:
        check_gradient(spec, model, trials, pieces, in_training)
    model.train(mode)
    _check_state(model, changes, run)
    _check_draws(changes, known, run)
    _check_use(known, run)
    _check_recompute(spec, model, known, samples[0], run)
    return frozenset(changes.buffers)


@torch.no_grad()
def find_changes(spec: ModelSpec, model: nn.Module, samples: Sequence[Any]) -> Changes:
    """Compare the module before and after forwards in training."""
    collate = collate_of(spec)
    batches = [collate([sample, sample]) for sample in (samples[0], samples[-1])]  # two: a norm needs more than one
    was_training = model.training
    sums, first, numbers = _sums(model), _State(model), _numbers(model)
    draws = _forward_in_training(spec, model, batches[0], "one")
    parameters = [name for name, total in _sums(model).items() if not _equal(total, sums[name])]
    once = _State(model)
    at_first = once.changed_since(first)
    again, of_the_batch, counted = set[str](), set[str](), list[str]()
    if at_first or _numbers(model) != numbers:
        numbers = _numbers(model)
        _forward_in_training(spec, model, batches[1], "another")
        again = _State(model).changed_since(once)  # a cache that is filled once does not count
        counted = [name for name, number in _numbers(model).items() if number != numbers.get(name, number)]
        first.restore(model)
        _forward_in_training(spec, model, batches[1], "another")
        of_the_batch = {name for name, b in _State(model).values.items() if not _equal(b, once.values.get(name, b))}
        first.restore(model)
    model.train(was_training)
    return Changes(parameters, sorted(at_first & again), sorted(of_the_batch & at_first), counted, draws)


class _State:
    """All buffers under all their names, as they are now."""

    def __init__(self, model: nn.Module) -> None:
        named = dict(model.named_buffers(remove_duplicate=False))
        self.values = {name: buffer.clone() for name, buffer in named.items()}
        self.written = {name: (id(buffer), buffer._version) for name, buffer in named.items()}

    def changed_since(self, before: "_State") -> set[str]:
        """A norm writes without a new version, and an iteration that has converged writes the same number."""
        return {
            name
            for name, value in self.values.items()
            if self.written[name] != before.written.get(name) or not _equal(value, before.values[name])
        }

    def restore(self, model: nn.Module) -> None:
        for name, buffer in model.named_buffers(remove_duplicate=False):
            if name in self.values and self.values[name].shape == buffer.shape:
                buffer.copy_(self.values[name])


def _forward_in_training(spec: ModelSpec, model: nn.Module, batch: Any, key: str) -> bool:
    """Whether it drew random numbers."""
    with own_draws(key):
        before = states()
        try:
            if spec.step is None:
                call_with(model.train(), batch[0])
            else:
                with torch.enable_grad():  # a step may need gradients on its way
                    spec.step(model.train(), *batch)
        except Exception as error:
            if spec.step is not None:  # it may know its GPU
                logger.info(f"the step cannot be tried on a CPU before training ({type(error).__name__}: {error})")
                return False
            raise Refusal(
                f"the model's forward fails in training, on the first sample twice{place_of(error)}: "
                f"{type(error).__name__}: {error}"
            ) from None
        return states() != before


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
    for what, name in [("buffer", changes.buffers), ("parameter", changes.parameters)]:
        if not name or own_pieces == 1:
            continue
        logger.info(
            f"forward changes the {what} {name[0]}, and a step calls it {own_pieces} times here, so this "
            f"{what} will not be as in one process"
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


@torch.no_grad()
def _check_recompute(spec: ModelSpec, model: nn.Module, known: Structure, sample: Any, run: Run) -> None:
    """Refuse a recompute of a layer that gives something else when it runs again, as one that fills a cache does."""
    layers = [part.name for part in known.parts if part.kind == "layer"]
    if run.config.activation_checkpoint.mode not in ("full", "selective") or not layers or spec.step is not None:
        return
    layer = model.get_submodule(layers[0])
    before: list[_State] = []

    def run_again(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        before[0].restore(layer)
        try:
            again = layer.forward(*args, **kwargs)
        except Exception:
            again = None
        pairs = zip(tree_leaves(output), tree_leaves(again), strict=False)
        if again is None or any(isinstance(a, Tensor) and not _equal(a, b) for a, b in pairs):
            raise Refusal(
                f'activation_checkpoint.mode = "{run.config.activation_checkpoint.mode}" runs {layers[0]} again in '
                "backward, and this layer gives something else when it runs again, because it changes what it is given "
                '(a cache: set use_cache = False in a configuration of transformers); or use mode = "none"'
            )

    hooks = [
        layer.register_forward_pre_hook(lambda *_: before.insert(0, _State(layer))),
        layer.register_forward_hook(run_again, with_kwargs=True),
    ]
    try:
        with own_draws("a recompute"):
            call_with(model.eval(), collate_of(spec)([sample, sample])[0])
    finally:
        for hook in hooks:
            hook.remove()


def _check_use(known: Structure, run: Run) -> None:
    """Refuse a compiler that would have nothing to compile."""
    if run.config.compile.model and not any(part.kind == "layer" for part in known.parts):
        raise Refusal(
            "compile.enable = true compiles layers, and the model names none; give its ModelSpec layers = the name of "
            'its list of layers, or set compile.components = ["loss"]'
        )
