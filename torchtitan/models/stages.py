"""Decides which stages a pipeline has, and which rank holds each (split.py cuts them). No torch."""

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
    from torchtitan.models.split import cut

    given = [key for key in _SPLIT_KEYS if getattr(parallelism, key) is not None]
    if len(given) > 1:
        raise Refusal(f"parallelism.{given[0]} and {given[1]} both say how the stages are cut; remove one of them")
    ranks, csv_microbatches, in_two_parts = None, None, schedule in BACKWARD_IN_TWO_PARTS
    if parallelism.pipeline_parallel_schedule_csv:
        from torchtitan.models.schedule_file import read_csv

        ranks, csv_microbatches, in_two_parts = read_csv(parallelism.pipeline_parallel_schedule_csv, degree)
    stages = cut(parts, parallelism, len(ranks) if ranks else None, stages_a_rank(schedule))
    if ranks is None:
        _check_stages_a_rank(len(stages), degree, schedule)
        ranks = place_stages(len(stages), schedule, degree)
    elif len(ranks) != len(stages):
        raise Refusal(
            f"parallelism.pipeline_parallel_schedule_csv schedules {len(ranks)} stages, but the model is cut into "
            f"{len(stages)}; cut it into {len(ranks)}"
        )
    return StagePlan(stages, tuple(ranks), in_two_parts, csv_microbatches)


def stages_a_rank(schedule: str) -> int:
    """How many stages a rank has by default."""
    return 1 if schedule in _ONE_STAGE_A_RANK else 2


def place_stages(count: int, schedule: str, degree: int) -> list[int]:
    """The rank that holds each stage."""
    return [min(s, 2 * degree - 1 - s) if schedule in V_SHAPED else s % degree for s in range(count)]


def holds_an_end(parallelism: Parallelism, rank: int) -> bool:
    """Whether a pipeline rank holds the first or the last stage."""
    last = 0 if parallelism.pipeline_parallel_schedule in V_SHAPED else parallelism.pipeline_parallel_degree - 1
    if parallelism.pipeline_parallel_schedule_csv:
        from torchtitan.models.schedule_file import read_csv

        last = read_csv(parallelism.pipeline_parallel_schedule_csv, parallelism.pipeline_parallel_degree)[0][-1]
    return rank in (0, last)


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
