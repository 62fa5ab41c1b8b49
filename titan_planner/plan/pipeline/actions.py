"""What each rank of a pipeline does, in order: the lists of torch's schedules, which the trainer executes."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch.distributed.pipelining.schedules import OVERLAP_F_B, PipelineScheduleSingle, get_schedule_class

from titan_planner.plan.pipeline.timeline import Action, Orders
from torchtitan.models.stages import V_SHAPED

SCHEDULES = ("GPipe", "1F1B", "LoopedBFS", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")


@dataclass
class _Stage:
    """All that a schedule asks of a stage while it makes its lists."""

    stage_index: int
    num_stages: int
    group_size: int
    group_rank: int = 0
    has_backward: bool = False
    is_last: bool = False
    is_first: bool = False
    stage_index_to_group_rank: Any = None
    submod: Any = None


def list_actions(schedule: str, ranks: int, stages_per_rank: int, microbatches: int) -> Orders:
    """The actions of each rank. A joint forward and backward is two actions, in its order."""
    if schedule == "1F1B":
        return [_one_forward_one_backward(rank, ranks, microbatches) for rank in range(ranks)]
    kind: Any = get_schedule_class(schedule)
    total = ranks * stages_per_rank
    own = [0, total - 1] if schedule in V_SHAPED else range(0, total, ranks)
    stages: Any = [_Stage(index, total, ranks) for index in own]
    single = issubclass(kind, PipelineScheduleSingle)
    made = kind(stages[0] if single else stages, microbatches, lambda *_: None)
    return [[action for entry in made.pipeline_order[rank] for action in _flat(entry)] for rank in range(ranks)]


def _one_forward_one_backward(rank: int, ranks: int, microbatches: int) -> list[Action]:
    """What torch's loop does. Its own list numbers the last rank's forwards from 1, and the loop does not read it."""
    ahead = min(microbatches, ranks - rank)
    actions = [Action(rank, "F", number) for number in range(ahead)]
    for number in range(microbatches):
        actions.append(Action(rank, "B", number))
        if ahead + number < microbatches:
            actions.append(Action(rank, "F", ahead + number))
    return actions


def _flat(entry: Any) -> Iterator[Action]:
    if entry is None:
        return
    if entry.computation_type == OVERLAP_F_B:
        for part in entry.sub_actions:
            yield from _flat(part)
    elif entry.is_compute_op:
        yield Action(entry.stage_index, entry.computation_type.value, entry.microbatch_index)
