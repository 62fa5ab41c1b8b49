"""Finds configurations that this model makes impossible, once all values are valid. No torch."""

import math
from collections.abc import Iterator

from torchtitan.config.schema import Config
from torchtitan.models.spec import Blueprint


def find_refusals(blueprint: Blueprint, config: Config) -> Iterator[str]:
    """All mistakes that depend on the model."""
    if not blueprint.reads_text:
        from torchtitan.models.own import OwnBlueprint, refusals

        assert isinstance(blueprint, OwnBlueprint)
        yield from refusals(blueprint, config)
        return
    refused = list(find_tensor_parallel_refusals(blueprint, config))
    yield from refused
    # If the degree is refused, checking lengths against it would only repeat the mistake.
    yield from _lengths(blueprint, config, tp=1 if refused else config.parallelism.tensor_parallel_degree)
    if config.parallelism.pipeline_parallel_degree > 1:
        from torchtitan.models.pipeline_rules import find_pipeline_refusals

        yield from find_pipeline_refusals(blueprint, config)
    keeps = config.checkpoint.initial_load_missing or config.checkpoint.keep_best
    if keeps or config.float8 is not None or config.parallelism.expert_parallel_degree > 1:
        from torchtitan.models.seldom_rules import find_seldom_refusals

        yield from find_seldom_refusals(blueprint, config)


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


def find_tensor_parallel_refusals(blueprint: Blueprint, config: Config) -> Iterator[str]:
    yield from blueprint.spec.refusals(blueprint.shape, config)
    degree = config.parallelism.tensor_parallel_degree
    if degree > 1 and blueprint.spec.tensor_plan is None:
        yield (
            f"parallelism.tensor_parallel_degree = {degree}, but {blueprint.name} has no tensor_plan that says how "
            f"ranks share its weights; use 1, or give its Family one"
        )
