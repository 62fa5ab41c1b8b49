"""Finds layouts that the number of ranks makes impossible."""

from collections.abc import Iterator

from torchtitan.config.layout import plan_batch, plan_layout
from torchtitan.config.schema import Config, Parallelism
from torchtitan.config.section import Finding
from torchtitan.refusal import Refusal


def find_layout_conflicts(config: Config, world_size: int | None) -> Iterator[Finding]:
    """Rules that depend on the number of ranks are checked only if it is known."""
    yield from _async_tensor_parallel(config)
    if world_size is not None:
        yield from _ranks(config, world_size)


def _async_tensor_parallel(config: Config) -> Iterator[Finding]:
    name, degree = "parallelism.enable_async_tensor_parallel", config.parallelism.tensor_parallel_degree
    if not config.parallelism.enable_async_tensor_parallel:
        return
    if degree == 1:
        yield (
            (name, "parallelism.tensor_parallel_degree"),
            f"{name} = true with tensor_parallel_degree = 1 has nothing to overlap; set it to false, or split tensors",
        )
    elif not (config.compile.model and config.compile.backend == "inductor"):
        yield (
            (name, "compile.enable", "compile.components", "compile.backend"),
            f"{name} = true needs the compiler; set compile.enable = true with "
            f'"model" among compile.components and compile.backend = "inductor", or set it to false',
        )


def _ranks(config: Config, world_size: int) -> Iterator[Finding]:
    degrees = tuple(f"parallelism.{key}" for key in Parallelism.model_fields if key.endswith("_degree"))
    try:
        dims = plan_layout(config.parallelism, world_size)
    except Refusal as error:
        yield degrees, str(error)
        return
    batch = ("training.global_batch_size", "training.local_batch_size", "training.num_streams")
    try:
        plan = plan_batch(config.training, dims.dp)
    except Refusal as error:
        yield (*degrees, *batch), str(error)
        return
    early = "optimizer.early_step_in_backward"
    if config.optimizer.early_step_in_backward and plan.num_local_batches > 1:
        yield (
            (early, *degrees, *batch),
            f"{early} = true with {plan.num_local_batches} local batches a step: their gradients are added up; set "
            f"training.global_batch_size = {plan.global_batch_size // plan.num_local_batches}, or {early} = false",
        )
