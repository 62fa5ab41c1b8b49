"""Decides which parts of a model each pipeline stage holds, and which rank holds the stage. No torch."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from torchtitan.config.schema import Parallelism
from torchtitan.models.spec import Part
from torchtitan.refusal import Refusal

_ONE_STAGE_A_RANK = ("1F1B", "GPipe")
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")  # rank r holds stages r and 2 pp - 1 - r
BACKWARD_IN_TWO_PARTS = ("InterleavedZeroBubble", *V_SHAPED)
_SPLIT_KEYS = ("module_fqns_per_model_part", "pipeline_parallel_layer_counts", "pipeline_parallel_layers_per_stage")


@dataclass(frozen=True)
class StagePlan:
    """The parts of each stage in order, the pipeline rank of each stage, and what the schedule does."""

    stages: tuple[tuple[Part, ...], ...]
    ranks: tuple[int, ...]
    backward_in_two_parts: bool = False  # the gradients of inputs, and later those of weights
    csv_microbatches: int | None = None

    def of_rank(self, rank: int) -> list[int]:
        """The stages a rank holds."""
        return [stage for stage, holder in enumerate(self.ranks) if holder == rank]

    def __str__(self) -> str:
        counts = [sum(part.kind == "layer" for part in stage) for stage in self.stages]
        return f"{len(counts)} stages of {'+'.join(map(str, counts))} layers on ranks {', '.join(map(str, self.ranks))}"


def plan_stages(parts: Sequence[Part], parallelism: Parallelism) -> StagePlan:
    """Cut the model as the configuration says. By default the slowest stage is as fast as possible."""
    degree, schedule = parallelism.pipeline_parallel_degree, parallelism.pipeline_parallel_schedule
    if degree == 1:
        return StagePlan((tuple(parts),), (0,))
    given = [key for key in _SPLIT_KEYS if getattr(parallelism, key) is not None]
    if len(given) > 1:
        raise Refusal(f"parallelism.{given[0]} and {given[1]} both say how the stages are cut; remove one of them")
    ranks, csv_microbatches, in_two_parts = None, None, schedule in BACKWARD_IN_TWO_PARTS
    if parallelism.pipeline_parallel_schedule_csv:
        from torchtitan.models.schedule_file import read_csv

        ranks, csv_microbatches, in_two_parts = read_csv(parallelism.pipeline_parallel_schedule_csv, degree)
    stages = _cut(parts, parallelism, len(ranks) if ranks else None)
    if ranks is None:
        _check_stages_a_rank(len(stages), degree, schedule)
        numbers = range(len(stages))
        ranks = [min(s, 2 * degree - 1 - s) if schedule in V_SHAPED else s % degree for s in numbers]
    elif len(ranks) != len(stages):
        raise Refusal(
            f"parallelism.pipeline_parallel_schedule_csv schedules {len(ranks)} stages, but the model is cut into "
            f"{len(stages)}; cut it into {len(ranks)}"
        )
    return StagePlan(stages, tuple(ranks), in_two_parts, csv_microbatches)


def _cut(parts: Sequence[Part], parallelism: Parallelism, num_stages: int | None) -> tuple[tuple[Part, ...], ...]:
    """The parts of each stage. A schedule file fixes the number of stages."""
    if (names := parallelism.module_fqns_per_model_part) is not None:
        _check_modules(names, [part.name for part in parts])
        by_name = {part.name: part for part in parts}
        return tuple(tuple(by_name[name] for name in stage) for stage in names)
    layers = [part for part in parts if part.kind == "layer"]
    if (counts := parallelism.pipeline_parallel_layer_counts) is not None:
        _check_counts(counts, len(layers))
    else:
        num_stages = num_stages or _default_num_stages(len(layers), parallelism)
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


def holds_an_end(parallelism: Parallelism, rank: int) -> bool:
    """Whether a pipeline rank holds the first or the last stage."""
    last = 0 if parallelism.pipeline_parallel_schedule in V_SHAPED else parallelism.pipeline_parallel_degree - 1
    if parallelism.pipeline_parallel_schedule_csv:
        from torchtitan.models.schedule_file import read_csv

        last = read_csv(parallelism.pipeline_parallel_schedule_csv, parallelism.pipeline_parallel_degree)[0][-1]
    return rank in (0, last)


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


def _default_num_stages(num_layers: int, parallelism: Parallelism) -> int:
    degree = parallelism.pipeline_parallel_degree
    if parallelism.pipeline_parallel_layers_per_stage is None:
        return degree * (1 if parallelism.pipeline_parallel_schedule in _ONE_STAGE_A_RANK else 2)
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


def _check_stages_a_rank(num_stages: int, degree: int, schedule: str) -> None:
    cut = f"the model is cut into {num_stages} stages for pipeline_parallel_degree = {degree}"
    if schedule in _ONE_STAGE_A_RANK and num_stages != degree:
        raise Refusal(f"parallelism: {cut}, but the schedule {schedule} has one stage a rank; cut it into {degree}")
    if schedule in V_SHAPED and num_stages != 2 * degree:
        raise Refusal(
            f"parallelism: {cut}, but the schedule {schedule} has two stages a rank; cut it into {2 * degree}"
        )
    if num_stages % degree or (schedule not in _ONE_STAGE_A_RANK and num_stages < 2 * degree):
        raise Refusal(
            f"parallelism: {cut}, but the schedule {schedule} has equally many on each rank, two or more; "
            f"cut it into {2 * degree} or {3 * degree}"
        )
