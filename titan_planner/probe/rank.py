"""One rank of a probe: times this device and its links, and rank 0 writes what was found as a cluster file.

verb.py starts it on each node. All ranks take part in every measurement, some without work, and repeat it until
two rounds agree on all of them.
"""

import itertools
import os
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import record

from titan_planner.probe.report import write
from torchtitan import hardware
from torchtitan.config.load import check
from torchtitan.config.schema import Config
from torchtitan.hardware import Place
from torchtitan.launch.preflight.leader import plan_rounds
from torchtitan.models.families import plan_model
from torchtitan.models.spec import Blueprint
from torchtitan.observe.failure import leave
from torchtitan.observe.log import start_logging
from torchtitan.observe.peers.no_watch import NoWatch
from torchtitan.observe.peers.watch import Watch
from torchtitan.parallel import collectives
from torchtitan.parallel.gpu_attention import Case, pick_attention
from torchtitan.refusal import Refusal
from torchtitan.tools.dry_run.estimate import blank_batch
from torchtitan.training.assemble import lay_out_ranks
from torchtitan.training.update import Update

_TIMEOUT_SECONDS = 60  # of any wait for another rank
_MOST_REPEATS, _MOST_ROUNDS = 200, 6
_AXES: dict[str, dict[str, Any]] = {
    "dp": {},
    "tp": {"tensor_parallel_degree": 2},
    "cp": {"context_parallel_degree": 2},
    "pp": {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "1F1B"},
}
_MOST_PAIRINGS = 31  # rounds in which each node is in one pair: all pairs of 32 nodes, some of more


@dataclass(frozen=True)
class Sizes:
    """Large enough to reach the device's speed, and no larger."""

    sides: tuple[int, ...]  # of products
    moved: int  # bytes of a tensor
    attention: tuple[int, int, int]  # heads, length, width of a head
    sent: tuple[int, ...]  # bytes
    model: dict[str, int]  # a small model whose steps are timed
    sequences: int  # of each rank, and their lengths: so many tokens that the ranks' exchange takes less time
    lengths: tuple[int, ...]
    round_seconds: float = 0.03
    seconds: float = 20.0  # then no round is repeated any more


ON_CPU = Sizes((64, 256, 1024), 2**26, (8, 512, 64), (2**14, 2**19, 2**23), {"n_layers": 4}, 4, (64, 256))
_WIDE = {"dim": 4096, "n_heads": 32, "n_kv_heads": 8, "hidden_dim": 14336, "n_layers": 2}
ON_GPU = Sizes((256, 1024, 8192), 2**29, (32, 8192, 128), (2**14, 2**22, 2**27), _WIDE, 4, (2048, 8192))


class Probe:
    """This rank's part of all measurements."""

    def __init__(self, place: Place, per_node: int, device: torch.device, dtype: str, sizes: Sizes) -> None:
        self.place, self.per_node, self.device, self.dtype, self.sizes = place, per_node, device, dtype, sizes
        self.num_nodes, self.end = place.world_size // per_node, time.monotonic() + sizes.seconds
        mesh = init_device_mesh(device.type, (self.num_nodes, per_node), mesh_dim_names=("nodes", "cards"))
        self.inside, self.across = mesh.get_group("cards"), mesh.get_group("nodes")

    def seconds(self, work: Callable[[], Any] | None, alone: bool = False) -> float:
        """Of one call: on a GPU the mean of a round, on a CPU the least, for other programs take turns with it.

        `alone`: no rank waits for another in it. On a CPU, time is then what this process had of its core.
        """
        on_cpu = self.device.type == "cpu"
        now = time.process_time if on_cpu and alone and torch.get_num_threads() == 1 else time.perf_counter

        def each(count: int) -> float:
            begin = now()
            for _ in range(count if work else 0):
                work()  # type: ignore[misc]
            self.wait()
            return (now() - begin) / count

        each(1)
        longest = torch.tensor(each(1), dtype=torch.float64)
        dist.all_reduce(longest, op=dist.ReduceOp.MAX)
        count = int(min(_MOST_REPEATS, max(2, self.sizes.round_seconds / max(1e-7, float(longest)))))
        rounds: list[float] = []
        again = True
        while collectives.any_says_so(again):
            rounds = sorted([*rounds, min(each(1) for _ in range(count)) if on_cpu else each(count)])
            is_time_up = len(rounds) >= _MOST_ROUNDS or time.monotonic() > self.end
            again = len(rounds) < 2 or (rounds[1] > 1.05 * rounds[0] and work is not None and not is_time_up)
        return rounds[0]

    def wait(self) -> None:
        """Until the device has done what is queued."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def tensor(self, *shape: int) -> Tensor:
        return torch.randn(*shape, device=self.device).to(getattr(torch, self.dtype))

    def of_device(self) -> dict[str, Any]:
        """Products by size as [rows, columns, inner, seconds], bytes moved and attention's FLOPs with their seconds."""
        sizes, products, most = self.sizes, [], self.sizes.sides[-1]
        shapes = [
            shape for side in sizes.sides for shape in ((most, most, side), (most, side, most), (side, most, most))
        ]
        for rows, columns, inner in dict.fromkeys(shapes):
            x, w = self.tensor(rows, inner), self.tensor(columns, inner)
            products.append([rows, columns, inner, self.seconds(lambda x=x, w=w: x @ w.T, alone=True)])  # type: ignore[misc]
        read = torch.ones(sizes.moved // 4, device=self.device)
        written = torch.empty_like(
            read
        )  # an activation function: a GPU computes it as fast as it copies, a CPU does not
        silu = self.seconds(lambda: torch.ops.aten.silu.out(read, out=written), alone=True)
        heads, length, width = sizes.attention
        dtype = getattr(torch, self.dtype)
        _, fastest = pick_attention(Case(self.device, dtype, heads, heads, width, length, keeps_apart=False))
        q, k, v = (self.tensor(1, heads, length, width).requires_grad_() for _ in range(3))

        def attention() -> None:
            F.scaled_dot_product_attention(q, k, v, is_causal=True).backward(q.detach())

        with fastest:
            found = [2 * length**2 * heads * width, self.seconds(attention, alone=True)]
        return {"products": products, "moving": [2 * sizes.moved, silu], "attention": found}

    def of_group(self, group: dist.ProcessGroup, shared: bool = False) -> list[list[float]]:
        """Gathers and scatters of so many bytes over so many ranks: [ranks, bytes, seconds]."""
        found: list[list[float]] = []
        if (ranks := group.size()) == 1:
            return found
        gather: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
        scatter: Any = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
        if shared:
            from torchtitan.parallel.shared_memory import SharedGather, SharedReduceScatter

            gather, scatter = SharedGather(group), SharedReduceScatter(group)
        for size in self.sizes.sent:
            whole = torch.ones(size // 4 // ranks * ranks, device=self.device)
            part = whole[: len(whole) // ranks].clone()
            gathering = self.seconds(lambda w=whole, p=part: gather(w, p, group=group))  # type: ignore[misc]
            if shared:
                whole = scatter.allocate(whole.shape, dtype=whole.dtype, device=self.device)
            reducing = self.seconds(lambda w=whole, p=part: scatter(p, w, op=dist.ReduceOp.SUM, group=group))  # type: ignore[misc]
            found += [[ranks, 4 * len(whole), each] for each in (gathering, reducing)]
        return found

    def of_pairs(self) -> list[list[float]]:
        """Messages of the first cards of two nodes: [from, to, bytes, seconds], with an answer of one value."""
        node, found = self.place.rank // self.per_node, []
        first, last = self.sizes.sent[0], self.sizes.sent[-1]
        for pairs in plan_rounds(self.num_nodes)[:_MOST_PAIRINGS] if self.num_nodes > 1 else []:
            pair = next((pair for pair in pairs if node in pair), None) if self.place.local_rank == 0 else None
            for sender, size in ((0, first), (0, last), (1, last)):
                if pair is None:
                    self.seconds(None)
                    continue
                sends, other = node == pair[sender], pair[node == pair[0]] * self.per_node
                values, answer = torch.ones(size, dtype=torch.uint8, device=self.device), self.tensor(1)
                order = (
                    [(dist.isend, values), (dist.irecv, answer)]
                    if sends
                    else [(dist.irecv, values), (dist.isend, answer)]
                )

                def exchange(order: Any = order, other: int = other) -> None:
                    for way, what in order:
                        for work in dist.batch_isend_irecv([dist.P2POp(way, what, other)]):
                            work.wait()

                seconds = self.seconds(exchange)
                found += [[pair[sender], pair[1 - sender], size, seconds]] * sends
        return found

    def of_steps(self) -> list[dict[str, Any]]:
        """Steps of a small model, as the trainer does them on all ranks: their seconds, and those of the update.

        On CPUs with an even number of ranks a node also on two ranks of each axis, which costs what a GPU hides.
        """
        found, sizes = [], self.sizes
        axes = [*_AXES] if self.device.type == "cpu" and self.per_node % 2 == 0 else ["dp"]
        for axis, length in itertools.product(axes, sizes.lengths):
            shape = {"sequences": sizes.sequences, "length": length, "model": sizes.model | {"vocab_size": 2048}}
            training = {"seq_len": length, "local_batch_size": sizes.sequences, "mixed_precision_param": self.dtype}
            keys = {"lr_scheduler": {"warmup_steps": 1}, "activation_checkpoint": {"mode": "none"}}
            keys |= {"model": shape["model"], "training": training | {"steps": 10}, "parallelism": _AXES[axis]}
            config = check(keys, "the probe", self.place.world_size)
            step = Step(self, config, plan_model(config))
            found.append({"axis": axis} | shape | {"step": self.seconds(step), "update": step.update_seconds})
        return found


class Step:
    """A step as the trainer does it, on a batch of zeros. Its parts are built here."""

    def __init__(self, probe: Probe, config: Config, blueprint: Blueprint) -> None:
        run = lay_out_ranks(config, blueprint, probe.place, probe.device)
        parts = run.build_model(seed=0)
        self.probe, self.forward_backward = probe, run.build_forward_backward(parts)
        optimizer = run.build_optimizer(parts)
        self.update = Update(config, parts, optimizer, run.mesh.stage_group, run.learning_rate_factor)
        self.update_seconds = float("inf")
        self.batch = blank_batch(config, run.blueprint, run.dims.dp).to(probe.device)

    def __call__(self) -> None:
        self.forward_backward(self.batch)
        self.probe.wait()
        begin = time.perf_counter()
        self.update.apply()
        self.probe.wait()
        self.update_seconds = min(self.update_seconds, time.perf_counter() - begin)


def usable_bytes(device: torch.device, per_node: int) -> int:
    """Memory that a process may use of its device, or of the host beside the node's other ranks."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    bounds = [8 * 2**30]  # where the system does not say
    if sys.platform == "linux":
        said = re.search(r"MemAvailable: *(\d+)", Path("/proc/meminfo").read_text())
        bounds, limit = [int(said[1]) * 1024] if said else bounds, Path("/sys/fs/cgroup/memory.max")
        bounds += [int(limit.read_text())] if limit.exists() and limit.read_text().strip().isdigit() else []
    return min(bounds) // per_node


def measure(place: Place, per_node: int, device: torch.device, sizes: Sizes, dtype: str | None) -> list[dict[str, Any]]:
    """What each rank measured, on all ranks."""
    mine: dict[str, Any] = {"bytes": usable_bytes(device, per_node), "device": hardware.describe_device(device)}
    mine["on_cpu"] = device.type == "cpu"
    small = 256 if device.type == "cpu" else None  # a CPU without instructions for bfloat16 takes seconds for more
    speeds = {
        name: hardware.measure_matmul_flops(device, getattr(torch, name), 0.05, small)
        for name in ("bfloat16", "float32")
    }
    used = [dtype or max(speeds, key=speeds.__getitem__)]
    dist.broadcast_object_list(used)
    mine |= {"dtype": used[0], "speeds": speeds, "peak": hardware.find_peak(device, getattr(torch, used[0])).flops}
    here = Probe(place, per_node, device, used[0], sizes)
    mine |= here.of_device() | {"inside": here.of_group(here.inside), "across": here.of_group(here.across)}
    mine["all"] = here.of_group(dist.group.WORLD) if here.num_nodes > 1 else []  # type: ignore[arg-type]
    mine["fsdp"] = here.of_group(here.inside, shared=True) if device.type == "cpu" else []
    mine |= {"pairs": here.of_pairs(), "steps": here.of_steps()}
    every: list[Any] = [None] * place.world_size
    dist.all_gather_object(every, mine)
    return every


@record
def main(out: Path, dtype: str | None) -> None:
    began, place = time.monotonic(), hardware.read_place()
    device, per_node = hardware.pick_device(place.local_rank), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    hardware.keep_to_own_cores(place, device)
    collectives.start_process_group(device, place.rank, place.world_size, _TIMEOUT_SECONDS)
    try:
        with Watch(Path("outputs/probe"), _TIMEOUT_SECONDS, []) if dist.get_world_size() > 1 else NoWatch():
            every = measure(place, per_node, device, ON_CPU if device.type == "cpu" else ON_GPU, dtype)
    finally:
        collectives.stop_process_group()
    if place.rank == 0:
        write(out, every, per_node, torch.__version__, time.monotonic() - began)


if __name__ == "__main__":
    hardware.end_with_launcher()
    start_logging(hardware.read_place().rank)
    try:
        main(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else None)
    except Refusal as error:
        leave(error)
