"""Finds configurations that this model makes impossible, once all values are valid. No torch."""

import math
from collections.abc import Iterator

from torchtitan.config.schema import Config
from torchtitan.models.spec import Blueprint
from torchtitan.models.stages import plan_microbatches, plan_stages
from torchtitan.refusal import Refusal


def find_refusals(blueprint: Blueprint, config: Config) -> Iterator[str]:
    """All mistakes that depend on the model."""
    if not blueprint.reads_text:
        from torchtitan.models.own import OwnBlueprint, refusals

        assert isinstance(blueprint, OwnBlueprint)
        yield from refusals(blueprint, config)
        return
    if config.checkpoint.initial_load_missing:
        yield (
            f"checkpoint.initial_load_missing: {blueprint.name} has a whole checkpoint or none; remove it, or bring "
            "the model as a module of your own (docs/recipe/any-model.md)"
        )
    if config.checkpoint.keep_best not in (None, "loss"):
        yield f'checkpoint.keep_best = "{config.checkpoint.keep_best}": {blueprint.name} has no metrics; use "loss"'
    refused = list(find_tensor_parallel_refusals(blueprint, config))
    yield from refused
    # If the degree is refused, checking lengths against it would only repeat the mistake.
    yield from _lengths(blueprint, config, tp=1 if refused else config.parallelism.tensor_parallel_degree)
    if config.parallelism.pipeline_parallel_degree > 1:
        yield from _pipeline(blueprint, config)
    yield from _float8(blueprint, config)


def _lengths(blueprint: Blueprint, config: Config, tp: int) -> Iterator[str]:
    """How long a sequence can be, and into what it can be split."""
    cp = config.parallelism.context_parallel_degree
    pieces = 2 * cp if cp > 1 else 1  # a head and a tail piece each, see parallel/context.py
    unit = math.lcm(pieces, cp * tp)
    lengths = {"training.seq_len": config.training.seq_len}
    if config.validation.enable:
        lengths["validation.seq_len"] = config.validation.seq_len
    longest = blueprint.shape.max_seq_len
    for key, seq_len in lengths.items():
        if seq_len > longest:
            yield f"{key} = {seq_len} is longer than {blueprint.name} can be: use {longest} or less"
        if seq_len % unit:
            yield (
                f"{key} = {seq_len} does not divide into the pieces of context_parallel_degree {cp} and "
                f"tensor_parallel_degree {tp}; use a multiple of {unit}, as {-(-seq_len // unit) * unit}"
            )


def _pipeline(blueprint: Blueprint, config: Config) -> Iterator[str]:
    """Whether the parts can be cut into stages, and whether the schedule can run on them."""
    parallelism, training = config.parallelism, config.training
    try:
        plan = plan_stages(blueprint.parts(training.seq_len), parallelism)
        if plan.backward_in_two_parts:
            yield from _two_parts(config)
        plan_microbatches(parallelism, plan, training.local_batch_size)
    except Refusal as error:
        yield str(error)
    if config.validation.enable and config.validation.local_batch_size not in (None, training.local_batch_size):
        yield (
            f"validation.local_batch_size = {config.validation.local_batch_size} goes through the training's pipeline "
            f"schedule, made for training.local_batch_size; use {training.local_batch_size}"
        )


def _two_parts(config: Config) -> Iterator[str]:
    """Find keys that a schedule excludes if it computes gradients of inputs first and gradients of weights later."""
    recompute, parallelism = config.activation_checkpoint, config.parallelism
    csv = parallelism.pipeline_parallel_schedule_csv
    name = "parallelism.pipeline_parallel_schedule" + ("_csv" if csv else "")
    for cannot, fix in (
        (config.compile.model, "a compiled block cannot do; leave model out of compile.components"),
        (
            recompute.by_operation,
            'recomputing by operation cannot do; use a number as activation_checkpoint.selective_ac_option, or "full"',
        ),
        (
            parallelism.fsdp_reshard_after_forward == "always",
            'needs the parameters that forward used; set fsdp_reshard_after_forward = "default"',
        ),
    ):
        if cannot:
            yield (
                f'{name} = "{csv or parallelism.pipeline_parallel_schedule}" runs backward in two parts, which '
                f"{fix}, or use {'whole backwards (B)' if csv else 'Interleaved1F1B'}"
            )


def find_tensor_parallel_refusals(blueprint: Blueprint, config: Config) -> Iterator[str]:
    yield from blueprint.spec.refusals(blueprint.shape, config)
    degree = config.parallelism.tensor_parallel_degree
    if degree > 1 and blueprint.spec.tensor_plan is None:
        yield (
            f"parallelism.tensor_parallel_degree = {degree}, but {blueprint.name} has no tensor_plan that says how "
            f"ranks share its weights; use 1, or give its Family one"
        )


def _float8(blueprint: Blueprint, config: Config) -> Iterator[str]:
    float8 = config.float8
    if float8 is None or not float8.enable_fsdp_float8_all_gather or blueprint.tied is None:
        return
    module = blueprint.tied[1].rpartition(".")[0]
    if not any(part in module for part in float8.filter_fqns):
        yield (
            f"quantize.linear.float8.enable_fsdp_float8_all_gather = true would part {blueprint.name}'s {module} layer "
            f'from the embedding that it shares its weight with; set filter_fqns = ["{module}"]'
        )
