"""Starts and stops the process group, and has the few reductions that a training loop needs."""

import functools
import os
import time
from collections import defaultdict
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _set_pg_timeout, default_pg_timeout
from torch.distributed.tensor import DTensor

from torchtitan.hardware import loopback
from torchtitan.refusal import Refusal

Number = TypeVar("Number", int, float)


def start_process_group(device: torch.device, rank: int, world_size: int, timeout_seconds: int) -> None:
    """Join the run's process group. Host tensors always travel over gloo, so they never wait for a GPU.

    A single process forms a group of one and needs no rendezvous.
    """
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    _give_gloo_one_thread()
    if world_size > 1:
        from torchtitan.parallel.meeting import meet

        meet(backend, rank, world_size, timeout_seconds)
        return
    if loopback() == "::1":  # gloo listens even then, and looks for 127.0.0.1
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    timeout = timedelta(seconds=timeout_seconds)
    dist.init_process_group(backend, rank=0, world_size=1, timeout=timeout, store=dist.HashStore())


@functools.cache
def _give_gloo_one_thread() -> None:
    """From now on each group of gloo runs its collectives in one thread.

    torch 2.13 has two, which both write the name of the last collective without a lock (ProcessGroupGloo::runLoop).
    A name of more than 15 letters, as DTensor's all-gather has, is on the heap: one thread may write into what the
    other has freed, and then the process dies.
    """
    gloo: Any = dist.ProcessGroupGloo
    plain = gloo.__init__

    def init(self: Any, store: dist.Store, rank: int, size: int, timeout: timedelta = default_pg_timeout) -> None:
        options, names = gloo._Options(), os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")
        try:
            devices = [gloo.create_device(interface=name) for name in names if name] or [gloo.create_default_device()]
        except RuntimeError as error:
            if "Unable to find address for" not in str(error):
                raise
            fix = "`ip address` lists them"
            raise Refusal(f"GLOO_SOCKET_IFNAME = {','.join(names)} is no interface here; {fix}") from None
        options._devices, options._threads, options._timeout = devices, 1, timeout
        plain(self, store, rank, size, options)

    gloo.__init__ = init  # for the whole process, because torch takes no options for gloo


def set_timeout(seconds: int, groups: list[dist.ProcessGroup]) -> None:
    """Set how long a collective may take, in the run's own group and in the given ones."""
    for group in [dist.group.WORLD, *groups]:
        _set_pg_timeout(timedelta(seconds=seconds), group)


def stop_process_group() -> None:
    if dist.is_initialized():
        # gloo's threads need Python's lock to free the last tensors. If a thread still waits for the lock when Python
        # exits, the process aborts: without this pause a third of the generations on two ranks did.
        time.sleep(0.02)
        dist.destroy_process_group()


def agree(*mine: bool) -> list[bool]:
    """Ask every rank the same questions, in one all-reduce over gloo: an answer is yes if one rank says yes."""
    if dist.get_world_size() == 1:
        return list(mine)
    everyones = torch.tensor(mine, dtype=torch.int32)
    dist.all_reduce(everyones, op=dist.ReduceOp.MAX)
    return [bool(said) for said in everyones.tolist()]


def any_says_so(mine: bool) -> bool:
    """True on every rank if at least one rank passes True."""
    return agree(mine)[0]


def sum_over(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum a device tensor over the group, in place. The host does not wait for the result."""
    if group.size() > 1:
        dist.all_reduce(tensor, group=group)
    return tensor


def max_over(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Take the maximum over the group, element by element, in place."""
    if group.size() > 1:
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group)
    return tensor


def from_rank_0(value: Number) -> Number:
    """Return rank 0's value on every rank."""
    tensor = torch.tensor(value, dtype=torch.int64 if isinstance(value, int) else torch.float64)
    if dist.get_world_size() > 1:
        dist.broadcast(tensor, src=0)
    return type(value)(tensor)


class GlobalNorm:
    """The 2-norm of all tensors of all stages together. Each shard counts once, and all ranks get the same value.

    A CPU takes the norm of each row and adds up the rows in float64. torch's own float32 norm of a whole tensor is off
    by 1e-4 at 5 million elements on a CPU, and the error depends on how the tensor is sharded.
    """

    def __init__(self, stages: dist.ProcessGroup | None = None) -> None:
        self.stages = stages
        self._squares: dict[tuple, list[Tensor]] = defaultdict(list)

    @torch.no_grad()
    def add(self, *tensors: Tensor) -> None:
        by_layout: dict[tuple, list[Tensor]] = defaultdict(list)
        for tensor in tensors:
            if isinstance(tensor, DTensor):
                by_layout[tensor.device_mesh, tensor.placements].append(tensor.to_local())
            else:
                by_layout[()].append(tensor)
        for layout, parts in by_layout.items():
            self._squares[layout] += squares_at_once(parts) if parts[0].is_cuda else squares_by_row(parts)

    def total(self) -> Tensor:
        """Return the norm of all tensors added since the last call, and start again from zero."""
        totals = []
        for layout, parts in self._squares.items():
            total = torch.stack(parts).sum()
            if layout:
                mesh, placements = layout
                for axis, placement in enumerate(placements):
                    if not placement.is_replicate() and mesh.size(axis) > 1:
                        dist.all_reduce(total, group=mesh.get_group(axis))
            totals.append(total)
        self._squares.clear()
        total = torch.stack(totals).sum()
        return (total if self.stages is None else sum_over(total, self.stages)).sqrt().float()


def squares_by_row(tensors: list[Tensor]) -> list[Tensor]:
    """Return one sum of squares of all tensors."""
    rows = [torch.linalg.vector_norm(tensor, dim=-1, dtype=torch.float32).reshape(-1) for tensor in tensors]
    return [torch.cat(rows).double().square().sum()]


def squares_at_once(tensors: list[Tensor]) -> list[Tensor]:
    """Return one sum of squares of all tensors, in few kernels: a GPU adds float32 in a tree, which is exact enough."""
    return [torch.stack(torch._foreach_norm(tensors, 2, dtype=torch.float32)).double().square().sum()]
