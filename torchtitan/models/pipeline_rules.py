"""Finds configurations that a pipeline of this model makes impossible. No torch."""

from collections.abc import Iterator

from torchtitan.config.schema import Config
from torchtitan.models.spec import Blueprint
from torchtitan.models.stages import plan_microbatches, plan_stages
from torchtitan.refusal import Refusal


def find_pipeline_refusals(blueprint: Blueprint, config: Config) -> Iterator[str]:
    """Whether the parts can be cut into stages, and whether the schedule can run on them."""
    parallelism, training = config.parallelism, config.training
    try:
        plan = plan_stages(blueprint.parts(training.seq_len), parallelism)
        if plan.backward_in_two_parts:
            yield from _two_parts(config)
        plan_microbatches(parallelism, plan, training.local_batch_size)
    except Refusal as error:
        yield str(error)
    yield from find_validation_refusals(config)


def find_validation_refusals(config: Config) -> Iterator[str]:
    """Whether validation fits the training's pipeline, whatever the model."""
    own, others = config.validation.local_batch_size, config.training.local_batch_size
    if config.validation.enable and own not in (None, others):
        yield (
            f"validation.local_batch_size = {own} goes through the training's pipeline schedule, made for "
            f"training.local_batch_size; use {others}"
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
