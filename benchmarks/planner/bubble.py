"""Measures the idle time of each pipeline schedule on stages of equal work, beside its closed form.

    python -m benchmarks.planner.bubble

The stages sleep instead of computing, so more ranks than cores can run side by side. For each microbatch a rank sleeps
two units of time in forward, two for the gradient of the input and two for the gradient of the weight, divided among
the rank's stages.
"""

import argparse
import os
import socket
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from torchtitan.config.schema import Model, Parallelism
from torchtitan.models.families import find_model
from torchtitan.models.stages import plan_stages
from torchtitan.parallel.parts import ModelParts
from torchtitan.parallel.pipeline import Pipeline

# schedule -> idle units on p ranks. With two stages a rank, each stage takes one unit for forward, one for the input
# gradient and one for the weight gradient. Sources: arXiv:2104.04473, section 2.2 (GPipe, 1F1B); arXiv:2401.10241,
# ZB-H1 (InterleavedZeroBubble); arXiv:2405.15362 (ZBV). DualPipeV is DualPipe (arXiv:2412.19437, table 2) on twice the
# ranks, without overlap of forward and backward.
IDLE = {
    "GPipe": lambda p: 6 * (p - 1),  # one stage a rank, of twice the work
    "1F1B": lambda p: 6 * (p - 1),
    "LoopedBFS": lambda p: 3 * (p - 1),
    "Interleaved1F1B": lambda p: 3 * (p - 1),
    "InterleavedZeroBubble": lambda p: p - 1,
    "ZBVZeroBubble": lambda p: 0,
    "DualPipeV": lambda p: 2 * (p - 1),
}


class Work(torch.autograd.Function):
    """The identity, which sleeps for a given time in forward and in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_seconds: float, backward_seconds: float) -> Tensor:
        ctx.backward_seconds = backward_seconds
        time.sleep(forward_seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        time.sleep(ctx.backward_seconds)
        return gradient, None, None


class Stage(nn.Module):
    """A stage whose weight gradient is computed apart from its input gradient, as in a matrix product."""

    def __init__(self, seconds: float, is_first: bool) -> None:
        super().__init__()
        self.weight, self.seconds, self.is_first = nn.Parameter(torch.zeros(1)), seconds, is_first

    def forward(self, x: Tensor, positions: Tensor, mask: None) -> Tensor:
        if self.is_first:
            x = x.float()[..., None].requires_grad_()
        weight = Work.apply(self.weight, 0.0, self.seconds)
        return Work.apply(x, self.seconds, self.seconds) + weight


def measure(rank: int, world_size: int, port: int, num_microbatches: int, seconds: float) -> None:
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    axis = init_device_mesh("cpu", (world_size,), mesh_dim_names=("pp",))
    parts = find_model(Model(flavor="70B")).parts(8192)
    if rank == 0:
        print(f"{world_size} ranks, {num_microbatches} microbatches\n\n| schedule | idle, measured | closed form |")
        print("| --- | --- | --- |")
    for schedule, idle in IDLE.items():
        parallelism = Parallelism(pipeline_parallel_degree=world_size, pipeline_parallel_schedule=schedule)
        plan = plan_stages(parts, parallelism)
        mine = plan.of_rank(rank)
        stages = {number: Stage(seconds * 2 / len(mine), number == 0) for number in mine}
        parts = ModelParts(stages, plan.ranks, axis, dim=1, vocab_size=1)
        run = Pipeline(parts, lambda output, labels: output.sum(), parallelism, torch.float32, torch.device("cpu"))
        tokens = torch.zeros(num_microbatches, 1, dtype=torch.long)
        elapsed = []
        for _ in range(4):
            dist.barrier()
            begin = time.perf_counter()
            run(tokens, tokens, None, None, torch.ones(()))
            dist.barrier()
            elapsed.append(time.perf_counter() - begin)
        work = 6 * num_microbatches
        if rank == 0:
            measured = 1 - work * seconds / min(elapsed)
            print(f"| {schedule} | {measured:.1%} | {idle(world_size) / (work + idle(world_size)):.1%} |", flush=True)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=4, help="number of ranks, each one process (default: %(default)s)")
    parser.add_argument("--microbatches", type=int, default=8, help="microbatches in a batch (default: %(default)s)")
    parser.add_argument("--milliseconds", type=float, default=40, help="one unit of work (default: %(default)s)")
    options = parser.parse_args()
    with socket.socket() as s:
        s.bind(("localhost", 0))
        port = s.getsockname()[1]
    mp.spawn(
        measure,
        (options.ranks, port, options.microbatches, options.milliseconds / 1000),
        nprocs=options.ranks,
    )


if __name__ == "__main__":
    main()
