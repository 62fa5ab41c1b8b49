"""How the ranks of a run divide into the axes of its mesh, and the global batch into local ones; pure, no torch."""

import math
from dataclasses import dataclass

from torchtitan.config.schema import Parallelism, Training
from torchtitan.refusal import Refusal

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")  # outermost first: tp ranks are neighbours


@dataclass(frozen=True)
class ParallelDims:
    """The degree of every mesh axis; their product is the number of ranks."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1  # ranks within a stage's replica that divide the experts; no axis of the mesh

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(getattr(self, axis) for axis in AXES)

    @property
    def dp(self) -> int:
        """Ranks that see different data."""
        return self.dp_replicate * self.dp_shard

    def __str__(self) -> str:
        return " x ".join(f"{axis} {n}" for axis in (*AXES, "ep") if (n := getattr(self, axis)) > 1) or "1 rank"


def plan_layout(parallelism: Parallelism, world_size: int) -> ParallelDims:
    """Fill in the sharded axis and check that the degrees multiply to the world size."""
    if world_size < 1:
        raise Refusal(f"the run has {world_size} ranks; use 1 or more")
    shard = parallelism.data_parallel_shard_degree
    others = {
        "data_parallel_replicate_degree": parallelism.data_parallel_replicate_degree,
        "tensor_parallel_degree": parallelism.tensor_parallel_degree,
        "context_parallel_degree": parallelism.context_parallel_degree,
        "pipeline_parallel_degree": parallelism.pipeline_parallel_degree,
    }
    product = math.prod(others.values())
    factors = " x ".join(f"{key} {value}" for key, value in others.items() if value > 1) or "the others' 1"
    if world_size % product:
        raise Refusal(
            f"parallelism: the product of {factors} does not divide the {world_size} ranks; "
            f"use degrees with a product of {_some([d for d in range(1, world_size + 1) if world_size % d == 0])}"
        )
    if shard == -1:
        shard = world_size // product
    if product * shard != world_size:
        raise Refusal(
            f"parallelism.data_parallel_shard_degree = {shard} times {factors} is {product * shard}, but the run has "
            f"{world_size} ranks; start {product * shard} ranks, or set data_parallel_shard_degree = -1"
        )
    replicate, tp, cp, pp = others.values()
    ep, ranks = parallelism.expert_parallel_degree, shard * cp * tp
    if ranks % ep:
        raise Refusal(
            f"parallelism.expert_parallel_degree = {ep} does not divide the {ranks} ranks of a stage and replica "
            f"(shards x context x tensor parallelism); use {_some([d for d in range(1, ranks + 1) if ranks % d == 0])}"
        )
    return ParallelDims(pp, replicate, shard, cp, tp, ep)


@dataclass(frozen=True)
class BatchPlan:
    """One optimizer step: sequences over all devices, and passes through the model on each."""

    global_batch_size: int
    num_local_batches: int
    num_streams: int


def plan_batch(training: Training, dp: int) -> BatchPlan:
    """Divide the global batch over data-parallel ranks, local batches and streams."""
    local, total = training.local_batch_size, training.global_batch_size
    if total == -1:
        total = local * dp
    if total % (local * dp):
        near = local * dp * max(1, round(total / (local * dp)))
        raise Refusal(
            f"training.global_batch_size = {total} is not a multiple of local_batch_size {local} x data-parallel "
            f"degree {dp} = {local * dp}; use {near}, or change local_batch_size"
        )
    streams = total if training.num_streams == -1 else training.num_streams
    if total % streams or streams % dp:
        fitting = [n for n in range(dp, min(total, 10_000 * dp) + 1, dp) if total % n == 0]
        raise Refusal(
            f"training.num_streams = {streams} must divide the global batch of {total} and be a multiple of the "
            f"data-parallel degree {dp}; use one of {_some(fitting)}, or -1"
        )
    return BatchPlan(global_batch_size=total, num_local_batches=total // (local * dp), num_streams=streams)


def _some(choices: list[int]) -> str:
    """`1, 2, 4, 8`, shortened where there are many."""
    shown = choices if len(choices) <= 12 else [*choices[:10], "...", choices[-1]]
    return ", ".join(map(str, shown))
