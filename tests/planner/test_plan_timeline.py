"""The simulation of pipelines against a replay that shares no code with it, and against closed forms."""

import itertools
import random

import numpy as np
import pytest

from titan_planner.plan.pipeline.actions import SCHEDULES, list_actions
from titan_planner.plan.pipeline.timeline import Action, Orders, Stuck, simulate
from titan_planner.plan.pipeline.waiting import COUNTED, first_rounds, moments, one_f_one_b

STAGES = {"GPipe": 1, "1F1B": 1, "LoopedBFS": 3, "Interleaved1F1B": 3, "InterleavedZeroBubble": 2}


def replay(orders: Orders, seconds: dict[tuple[int, str], float], hop: float) -> dict[Action, float]:
    """Ends of all actions, by raising each until nothing changes."""
    rank_of = {action.stage: rank for rank, actions in enumerate(orders) for action in actions}
    ends = {action: 0.0 for actions in orders for action in actions}
    changed = True
    while changed:
        changed = False
        for rank, actions in enumerate(orders):
            before = 0.0
            for action in actions:
                stage, kind, number = action
                begin = before
                if kind == "F":
                    sources = [(stage - 1, "F")]
                else:
                    sources = [(stage, "I")] if kind == "W" else [(stage, "F"), (stage + 1, "B"), (stage + 1, "I")]
                for source, what in sources:
                    if (end := ends.get(Action(source, what, number))) is not None:
                        begin = max(begin, end + hop * (rank_of[source] != rank))
                before = begin + seconds[stage, kind]
                if before > ends[action]:
                    ends[action], changed = before, True
    return ends


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("ranks", [2, 4])
def test_all_schedules_equal_an_independent_replay_with_unlike_stages(schedule: str, ranks: int) -> None:
    chance = random.Random(schedule)
    per_rank = STAGES.get(schedule, 2)
    for microbatches in (2 * ranks, 4 * ranks):
        orders = list_actions(schedule, ranks, per_rank, microbatches)
        seconds = {(stage, kind): chance.uniform(0.5, 2) for stage in range(ranks * per_rank) for kind in "FBIW"}
        slower = {action: np.array([1.0, chance.uniform(1, 2)]) * each for action, each in seconds.items()}
        found = simulate(orders, slower, np.array([0.3, 0.1]))  # two layouts at once
        for layout, hop in enumerate((0.3, 0.1)):
            own = {action: float(each[layout]) for action, each in slower.items()}
            ends = {span.action: float(span.end[layout]) for spans in found.spans for span in spans}
            assert ends == pytest.approx(replay(orders, own, hop))
            assert found.seconds[layout] == max(ends.values())
        forwards = [action for action in ends if action.kind == "F"]
        assert len(forwards) == microbatches * ranks * per_rank


@pytest.mark.parametrize(
    ("ranks", "per_rank", "microbatches"), [(2, 1, 4), (4, 1, 8), (4, 2, 8), (4, 3, 16), (8, 2, 16)]
)
def test_equal_stages_take_what_the_closed_form_says(ranks: int, per_rank: int, microbatches: int) -> None:
    orders = list_actions("1F1B" if per_rank == 1 else "Interleaved1F1B", ranks, per_rank, microbatches)
    seconds = {(stage, kind): 1.0 if kind == "F" else 2.0 for stage in range(ranks * per_rank) for kind in "FB"}
    found = simulate(orders, seconds, 0.0)
    assert found.seconds == pytest.approx(3 * per_rank * microbatches + 3 * (ranks - 1))
    assert found.idle(0) == pytest.approx((ranks - 1) / (per_rank * microbatches + ranks - 1))
    if per_rank > 1:  # of all messages only those of the first way there and of the last way back show
        shown = 2 * (ranks * per_rank - 1) * 0.1
        assert simulate(orders, seconds, 0.1).seconds == pytest.approx(found.seconds + shown)


def test_what_waits_is_what_the_search_counts() -> None:
    for ranks, per_rank, microbatches in itertools.product((2, 4), (1, 2, 3), (4, 6, 8, 16)):
        if microbatches % max(1, microbatches // ranks):
            continue
        orders = list_actions("1F1B" if per_rank == 1 else "Interleaved1F1B", ranks, per_rank, microbatches)
        layers = {stage: 1 + stage % 3 for stage in range(ranks * per_rank)}
        found = simulate(orders, {(s, k): 1.0 for s in layers for k in "FB"}, 0.0)
        for rank in range(ranks):
            listed = [(action.kind, action.stage // ranks) for action in orders[rank]]
            assert one_f_one_b(ranks, per_rank, microbatches, rank) == listed
            own = tuple(layers[stage] for stage in range(rank, ranks * per_rank, ranks))
            names, counts = moments(ranks, per_rank, int(first_rounds(microbatches, ranks)), rank, own)
            counted = counts[[name == "a layer's backward" for name in names], COUNTED.index("waits")].max()
            assert counted == found.waiting(rank, layers)


def test_lists_that_wait_for_each_other_are_found() -> None:
    orders = [[Action(0, "B", 0), Action(0, "F", 0)], [Action(1, "F", 0), Action(1, "B", 0)]]
    with pytest.raises(Stuck, match="rank 0"):
        simulate(orders, {(s, k): 1.0 for s in (0, 1) for k in "FB"}, 0.0)
