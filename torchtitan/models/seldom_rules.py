"""Finds what a model makes impossible of what few runs ask for; a plain run does not load this file. No torch."""

from collections.abc import Iterator

from torchtitan.config.schema import Config, Float8
from torchtitan.models.spec import Blueprint


def find_seldom_refusals(blueprint: Blueprint, config: Config) -> Iterator[str]:
    if config.checkpoint.initial_load_missing:
        yield (
            f"checkpoint.initial_load_missing: {blueprint.name} has a whole checkpoint or none; remove it, or bring "
            "the model as a module of your own (docs/recipe/any-model.md)"
        )
    best = config.checkpoint.keep_best
    if best not in (None, "loss") and not ("/" in best and config.validation.tasks):  # a task and its metric
        yield f'checkpoint.keep_best = "{best}": {blueprint.name} has no metrics; use "loss"'
    if config.float8 is not None:
        yield from _float8(blueprint, config.float8)
    degree, count = config.parallelism.expert_parallel_degree, blueprint.num_experts
    if degree > 1 and not count:
        yield f"parallelism.expert_parallel_degree = {degree}, but {blueprint.name} has no experts; use 1"
    elif count % degree:
        fitting = [str(each) for each in range(1, count + 1) if count % each == 0]
        yield (
            f"parallelism.expert_parallel_degree = {degree} does not divide the {count} experts of {blueprint.name}; "
            f"use one of {', '.join(fitting)}"
        )


def _float8(blueprint: Blueprint, float8: Float8) -> Iterator[str]:
    if not float8.enable_fsdp_float8_all_gather or blueprint.tied is None:
        return
    module = blueprint.tied[1].rpartition(".")[0]
    if not any(part in module for part in float8.filter_fqns):
        yield (
            f"quantize.linear.float8.enable_fsdp_float8_all_gather = true would part {blueprint.name}'s {module} layer "
            f'from the embedding that it shares its weight with; set filter_fqns = ["{module}"]'
        )
