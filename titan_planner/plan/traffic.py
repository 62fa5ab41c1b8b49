"""Bytes that a rank of a layout moves in a step, by collective: closed forms that equal the dry run's counts. No torch.

As there, a gather and a scatter count with the whole tensor, whatever the part that a rank has of it.
"""

from collections import Counter
from collections.abc import Sequence
from operator import mul

from titan_planner.plan.cost import Layout
from titan_planner.plan.pipeline.waiting import active, one_f_one_b
from torchtitan.models.operations import Block, Exchange, Work

_BACKWARD = {"gather": "scatter", "scatter": "gather", "all-reduce": "all-reduce", "all-to-all": "all-to-all"}
_NAMES = {"gather": "all-gather", "scatter": "reduce-scatter", "all-reduce": "all-reduce", "all-to-all": "all-to-all"}
_DOUBLE = 8  # bytes of a count of tokens, and of a norm


def traffic(work: Work, layout: Layout, layers: Sequence[int], rank: int) -> dict[str, int]:
    """Of a pipeline rank with so many layers in each of its stages; without a pipeline, of every rank."""
    piped, is_first, is_last = layout.pp > 1, rank == 0, rank == layout.pp - 1
    runs = layout.microbatches * layout.passes
    moved: Counter[str] = Counter()
    for block, count, recompute in (
        (work.layer, sum(layers), layout.recompute),
        (work.ends, is_last, "none"),
        (Block(work.start, 0), is_first, "none"),
    ):
        for name, size in _exchanged(block, layout, recompute).items():
            moved[name] += size * count * runs
    shards, exchanges = layout.dp * layout.cp, layout.passes if piped else runs
    stages = [count * work.layer.parameters for count in layers]
    stages[0] += is_first * work.lookup
    stages[-1] += is_last * (work.ends.parameters - (not piped and work.is_tied) * work.lookup)
    times = _gathers(layout, rank) if piped else [1]
    if shards > 1:
        # The last unit stays gathered: the output layer, or where it is tied, the last layer.
        again = 0 if piped else layout.regathers * work.layer.parameters * (sum(layers) - work.is_tied)
        gathered = again + sum(size * number for size, number in zip(stages, times, strict=True))
        moved["all-gather"] += 2 * gathered * exchanges
        moved["reduce-scatter"] += 4 * sum(stages) * exchanges
    experts = work.layer.experts
    if layout.expert_shards > 1:  # the last layer's experts stay gathered
        again = 0 if piped else layout.regathers * (sum(layers) - 1)
        moved["all-gather"] += 2 * experts * (again + sum(map(mul, layers, times))) * exchanges
        moved["reduce-scatter"] += 4 * experts * sum(layers) * exchanges
    if layout.replicas > 1:
        own = sum(stages) / shards + experts * sum(layers) / layout.expert_shards
        moved["all-reduce"] += 4 * own * exchanges
    if layout.tp > 1:  # gradients that wait are in float32
        replicated = sum(layers) * work.layer.replicated + is_last * work.ends.replicated
        moved["all-reduce"] += replicated * (4 if piped else 2) * exchanges
    # The count of tokens; the norm of the gradient over stages, shards, and tensor-parallel ranks, which split weights
    # by rows, by columns, or not at all.
    split = layout.tp > 1
    scalars = (shards * layout.replicas > 1) + piped + (3 if split else 1) * (shards > 1) + 2 * split
    moved["all-reduce"] += _DOUBLE * scalars
    if piped:
        hops = 2 * len(layers) - is_first - is_last
        tied = 4 * work.lookup / shards * (work.is_tied and (is_first or is_last))
        moved["send"] = moved["recv"] = hops * (work.sent * runs + 4) + tied  # one number greets each neighbour
    return {name: round(size) for name, size in moved.items() if size}


def _exchanged(block: Block, layout: Layout, recompute: str) -> Counter[str]:
    """By one microbatch in a block."""
    found: Counter[str] = Counter()
    for one in block.operations:
        if isinstance(one, Exchange) and getattr(layout, one.axis) > 1:
            again = 1.0 if recompute == "full" else one.again.get(recompute, 0.0)
            found[_NAMES[one.kind]] += one.bytes * one.count * (1 + again)
            found[_NAMES[_BACKWARD[one.kind]]] += one.bytes * one.back
    return found


def _gathers(layout: Layout, rank: int) -> list[int]:
    """How often a pass gathers each stage of the rank."""
    actions = one_f_one_b(layout.pp, layout.stages_per_rank, layout.microbatches, rank)
    before, times = set[int](), [0] * layout.stages_per_rank
    for stages in active(actions):
        for stage in set(stages) - before:
            times[stage] += 1
        before = set(stages)
    return times
