"""A layout's pipeline under each of torch's schedules."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from titan_planner.plan.cluster import Cluster
from titan_planner.plan.cost import Layout
from titan_planner.plan.pipeline.actions import SCHEDULES, list_actions
from titan_planner.plan.pipeline.timeline import Timeline, simulate
from titan_planner.plan.search import Choice, Job
from torchtitan.models.operations import Product, Share
from torchtitan.models.stages import V_SHAPED

_ONE_STAGE = ("GPipe", "1F1B")


@dataclass(frozen=True)
class ScheduledPass:
    """One schedule of a layout."""

    schedule: str
    stages_per_rank: int
    timeline: Timeline
    waiting: float  # layers times microbatches that wait for backward on the fullest rank
    hop: float  # seconds of a message

    @property
    def idle(self) -> float:
        return float(np.mean([self.timeline.idle(rank) for rank in range(len(self.timeline.spans))]))


def compare(job: Job, cluster: Cluster, choice: Choice, cuts: Mapping[int, Sequence[int]]) -> list[ScheduledPass]:
    """The pipeline of `choice` under every schedule that takes as many microbatches; the fastest comes first."""
    runs = []
    for schedule in SCHEDULES:
        stages = 1 if schedule in _ONE_STAGE else 2 if schedule in V_SHAPED else max(2, choice.stages_per_rank)
        number = choice.pp * stages
        if number not in cuts or (schedule == "DualPipeV" and choice.microbatches < number):
            continue
        orders = list_actions(schedule, choice.pp, stages, choice.microbatches)
        seconds, hop = stage_seconds(job, cluster, replace(choice, stages_per_rank=stages), cuts[number])
        timeline = simulate(orders, seconds, hop)
        layers = {stage: float(count) for stage, count in enumerate(cuts[number])}
        waiting = max(timeline.waiting(rank, layers) for rank in range(choice.pp))
        runs.append(ScheduledPass(schedule, stages, timeline, waiting, hop))
    return sorted(runs, key=lambda run: run.timeline.seconds)


def stage_seconds(
    job: Job, cluster: Cluster, choice: Choice, layers: Sequence[int]
) -> tuple[dict[tuple[int, str], float], float]:
    """Of each stage's actions, and of a message. Backward's part for weights is one of a product's two products."""
    machine, rates = cluster.machine, cluster.machine.rates
    assert job.blueprint.spec.operations is not None
    share = Share(choice.microbatch, job.seq_len, choice.tp, choice.cp, choice.ep)
    work = job.blueprint.spec.operations(job.blueprint.shape, share)
    layout = Layout(tp=choice.tp, cp=choice.cp, ep=choice.ep, recompute=choice.recompute)
    layout = replace(layout, compiled=job.compiled, float8=job.float8, wide=job.wide)
    seconds: dict[tuple[int, str], float] = {}
    forward, backward = (float(part) + rates.layer for part in machine.block(work.layer, layout))
    end_forward, end_backward = (float(part) for part in machine.block(work.ends, replace(layout, recompute="none")))
    weights, end_weights = (
        sum(float(machine.seconds(one, layout)[1]) / 2 for one in block.operations if isinstance(one, Product))
        for block in (work.layer, work.ends)
    )
    for stage, count in enumerate(layers):
        is_last = stage == len(layers) - 1
        seconds[stage, "F"] = count * forward + is_last * end_forward
        seconds[stage, "B"] = count * backward + is_last * end_backward
        seconds[stage, "W"] = count * weights + is_last * end_weights
        seconds[stage, "I"] = seconds[stage, "B"] - seconds[stage, "W"]
    near = choice.dp * choice.replicas * choice.cp * choice.tp < machine.device.per_node
    link = machine.device.inside * rates.inside if near else machine.device.between * rates.between
    return seconds, job.wide * float(work.sent) / link + (rates.latency if near else rates.hop)
