"""Finds configurations that a pipeline of this model makes impossible. No torch."""

from collections.abc import Iterator

from torchtitan.config.schema import Config, Parallelism
from torchtitan.models.spec import Blueprint
from torchtitan.models.stages import StagePlan, plan_stages
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


def plan_microbatches(parallelism: Parallelism, plan: StagePlan, local_batch_size: int) -> int:
    """How many microbatches the local batch makes, if the schedule can run as many."""
    size, degree = parallelism.pipeline_parallel_microbatch_size, parallelism.pipeline_parallel_degree
    if local_batch_size % size:
        fitting = ", ".join(str(d) for d in range(1, local_batch_size + 1) if local_batch_size % d == 0)
        raise Refusal(
            f"parallelism.pipeline_parallel_microbatch_size = {size} does not divide "
            f"training.local_batch_size = {local_batch_size}; use one of {fitting}"
        )
    count, stages, schedule = local_batch_size // size, len(plan.ranks), parallelism.pipeline_parallel_schedule
    made = f"training.local_batch_size = {local_batch_size} makes {count} microbatches of {size}"
    if plan.csv_microbatches is not None:
        if count != plan.csv_microbatches:
            raise Refusal(
                f"{made}, but parallelism.pipeline_parallel_schedule_csv schedules {plan.csv_microbatches}; "
                f"use local_batch_size = {plan.csv_microbatches * size}"
            )
    elif schedule in ("1F1B", "DualPipeV") and count < stages:
        raise Refusal(
            f"{made}, but the schedule {schedule} needs at least one for each of {stages} stages; "
            f"use local_batch_size = {stages * size} or more, or GPipe"
        )
    elif schedule in ("Interleaved1F1B", "InterleavedZeroBubble") and count % max(1, count // degree):
        fitting_count = degree * (count // degree)
        raise Refusal(
            f"{made}, but the schedule {schedule} runs them in rounds of equal size, {degree} or a few more in each; "
            f"use local_batch_size = {fitting_count * size} or {(fitting_count + degree) * size}"
        )
    return count


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
