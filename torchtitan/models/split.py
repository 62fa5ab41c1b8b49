"""Cuts a model into the stages of a pipeline, as the configuration says or by cost. No torch."""

import itertools
import math
from collections.abc import Sequence

from torchtitan.config.schema import Parallelism
from torchtitan.models.spec import Part
from torchtitan.refusal import Refusal


def cut(
    parts: Sequence[Part], parallelism: Parallelism, num_stages: int | None, stages_a_rank: int
) -> tuple[tuple[Part, ...], ...]:
    """The parts of each stage. A schedule file fixes the number of stages; by default each rank has `stages_a_rank`."""
    if (names := parallelism.module_fqns_per_model_part) is not None:
        _check_modules(names, [part.name for part in parts])
        by_name = {part.name: part for part in parts}
        return tuple(tuple(by_name[name] for name in stage) for stage in names)
    layers = [part for part in parts if part.kind == "layer"]
    if (counts := parallelism.pipeline_parallel_layer_counts) is not None:
        _check_counts(counts, len(layers))
    else:
        num_stages = num_stages or _default_num_stages(len(layers), parallelism, stages_a_rank)
        if num_stages > len(layers):
            raise Refusal(
                f"parallelism.pipeline_parallel_degree = {parallelism.pipeline_parallel_degree} with "
                f"{parallelism.pipeline_parallel_schedule} makes {num_stages} stages, but the model has only "
                f"{len(layers)} layers; use fewer ranks, or say pipeline_parallel_layer_counts"
            )
        counts = _spread(parts, parallelism, num_stages)
    first = parts.index(layers[0])
    ends = [*itertools.accumulate(counts, initial=first)]
    ends[0], ends[-1] = 0, len(parts)
    return tuple(tuple(parts[begin:end]) for begin, end in itertools.pairwise(ends))


def _default_num_stages(num_layers: int, parallelism: Parallelism, stages_a_rank: int) -> int:
    if parallelism.pipeline_parallel_layers_per_stage is None:
        return parallelism.pipeline_parallel_degree * stages_a_rank
    weights = _end_weights(parallelism) or (1, 1)
    return math.ceil((num_layers + sum(weights)) / parallelism.pipeline_parallel_layers_per_stage)


def _end_weights(parallelism: Parallelism) -> tuple[int, int] | None:
    """How many layers the embedding and the output count for, if the configuration says so."""
    first = parallelism.pipeline_parallel_first_stage_less_layers
    last = parallelism.pipeline_parallel_last_stage_less_layers
    if first is None and last is None:
        return None
    return (1 if first is None else first, 1 if last is None else last)


def _spread(parts: Sequence[Part], parallelism: Parallelism, num_stages: int) -> list[int]:
    """Layers of each stage."""
    num_layers = sum(part.kind == "layer" for part in parts)
    weights = _end_weights(parallelism)
    if num_stages == 1:
        return [num_layers]
    if weights is None:
        return balanced_counts(parts, num_stages)
    # torchtitan's rule: embedding and output count as so many layers, the first stages take what is left over
    each, more = divmod(num_layers + sum(weights), num_stages)
    counts = [each + (i < more) for i in range(num_stages)]
    counts[0] -= weights[0]
    counts[-1] -= weights[1]
    if min(counts) < 0:
        raise Refusal(
            f"parallelism.pipeline_parallel_first_stage_less_layers = {weights[0]} and last_stage_less_layers = "
            f"{weights[1]} leave a stage with {min(counts)} of the {num_layers} layers; use smaller numbers, or None"
        )
    return counts


def balanced_counts(parts: Sequence[Part], num_stages: int) -> list[int]:
    """Make the slowest stage as fast as possible, and among such cuts the largest stage as small as possible.

    Time is counted in FLOPs, where a lookup costs nothing, and size in parameters, where it does. The cut assumes
    that all layers cost the same.
    """
    layers = [part for part in parts if part.kind == "layer"]
    begin, end = parts[: parts.index(layers[0])], parts[parts.index(layers[-1]) + 1 :]
    groups = begin, layers[:1], end
    costs = [[sum(getattr(part, cost) for part in group) for group in groups] for cost in ("flops", "parameters")]

    def cost(first: int, last: int) -> tuple[int, int, int]:
        inner = math.ceil((len(layers) - first - last) / (num_stages - 2)) if num_stages > 2 else 0
        times, sizes = ((first * one + before, inner * one, last * one + after) for before, one, after in costs)
        return max(times), max(sizes), sum(t * t for t in times)

    most = len(layers) - num_stages + 2  # of both ends together
    # An end with more layers than these has more than a stage between the ends, which could take one.
    pairs = itertools.product(range(1, math.ceil((len(layers) - 1) / (num_stages - 1)) + 2), repeat=2)
    first, last = min((p for p in pairs if sum(p) == most or num_stages > 2 and sum(p) < most), key=lambda p: cost(*p))
    each, more = divmod(len(layers) - first - last, max(1, num_stages - 2))
    # In 1F1B early stages hold more activations: the longer ones come late.
    inner = [each + (i >= num_stages - 2 - more) for i in range(num_stages - 2)]
    return [first, *inner, last]


def _check_modules(stages: list[list[str]], wanted: list[str]) -> None:
    given = [name for stage in stages for name in stage]
    if given == wanted and all(stages):
        return
    name = "parallelism.module_fqns_per_model_part"
    if not all(stages):
        raise Refusal(f"{name} has an empty stage; every stage needs a module")
    missing, unknown = [n for n in wanted if n not in given], [n for n in given if n not in wanted]
    reason = "names a module twice or out of order"
    if missing or unknown:
        reason = f"leaves out {', '.join(missing)}" if missing else f"names {unknown[0]}, which the model has not"
    raise Refusal(f"{name} {reason}; use each of the model's parts once and in order: {', '.join(wanted)}")


def _check_counts(counts: list[int], num_layers: int) -> None:
    name = f"parallelism.pipeline_parallel_layer_counts = {counts}"
    if sum(counts) != num_layers:
        raise Refusal(f"{name} adds up to {sum(counts)}, but the model has {num_layers} layers; use {num_layers}")
    if not all(counts[1:-1]) or len(counts) < 2:
        raise Refusal(f"{name}: only the first and the last of two or more stages may be without layers")
