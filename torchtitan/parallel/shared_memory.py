"""FSDP's all-gather and reduce-scatter through shared memory instead of sockets, for ranks on one machine's CPU.

The sums equal gloo's. The time that communication adds to a step falls to a third (docs/recipe/figures.md). FSDP2
takes these objects in `set_custom_all_gather` and `set_custom_reduce_scatter`.
"""

import mmap
import os
import secrets
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan.observe.log import logger

# torch 2.13 warns that the older names are deprecated; torch 2.11 has only those.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
_FOLDER = "/dev/shm"  # Linux keeps files here in memory


class SharedMemory:
    """Memory that all ranks of a group map, with a part for each rank. It grows when a caller needs more."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self._bytes: Tensor | None = torch.empty(0, dtype=torch.uint8)

    def parts(self, numel: int, dtype: torch.dtype) -> list[Tensor]:
        """Return one tensor of this many elements for each rank, or [] if memory is short. All ranks must ask alike."""
        size = -(-numel * dtype.itemsize // mmap.PAGESIZE) * mmap.PAGESIZE
        if self._bytes is not None and len(self._bytes) < size * self.group.size():
            self._bytes = None  # free the old memory before the new is mapped
            self._bytes = self._map(size * self.group.size())
        if self._bytes is None:
            return []
        return [part[: numel * dtype.itemsize].view(dtype) for part in self._bytes.split(size)[: self.group.size()]]

    def wait_for_all(self) -> None:
        """Wait until every rank is here. Afterwards every rank sees what the others wrote before."""
        dist.barrier(self.group)

    def _map(self, size: int) -> Tensor | None:
        """Map new memory on all ranks, or return None on all if it fails on one.

        The file is unlinked as soon as every rank has mapped it, so nothing is left behind however the ranks end.
        """
        is_creator = self.group.rank() == 0
        names = [f"torchtitan-{secrets.token_hex(8)}"]
        mine = self._map_file(names[0], size, os.O_CREAT | os.O_EXCL) if is_creator else None
        try:
            dist.broadcast_object_list(names, group=self.group, group_src=0)
            if not is_creator:
                mine = self._map_file(names[0], size, 0)
            failures = torch.tensor(int(mine is None))
            dist.all_reduce(failures, group=self.group)
        finally:
            if is_creator and mine is not None:
                os.unlink(os.path.join(_FOLDER, names[0]))
        if is_creator and failures:
            logger.info(
                f"FSDP communicates through sockets: {int(failures)} of {self.group.size()} ranks cannot share "
                f"{size / 2**20:.0f} MiB of {_FOLDER} with rank {dist.get_rank()}"
            )
        return None if failures else mine

    @staticmethod
    def _map_file(name: str, size: int, flags: int) -> Tensor | None:
        try:
            file = os.open(os.path.join(_FOLDER, name), os.O_RDWR | flags, 0o600)
        except OSError:  # a rank on another machine, or no such folder (not Linux)
            return None
        try:
            os.posix_fallocate(file, 0, size)  # reserve the room now: a write without it would kill the process
            return torch.frombuffer(mmap.mmap(file, size), dtype=torch.uint8)
        except OSError:
            if flags:
                os.unlink(os.path.join(_FOLDER, name))
            return None
        finally:
            os.close(file)


class SharedGather:
    """All-gather: each rank writes its part to shared memory and reads the other ranks' parts from there."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._memory, self._other = SharedMemory(group), SharedMemory(group)

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        parts = self._memory.parts(input_tensor.numel(), input_tensor.dtype)
        if not parts:
            return _all_gather(output_tensor, input_tensor, group=group, async_op=async_op)
        parts[group.rank()].copy_(input_tensor)  # input_tensor is its slice of output_tensor, so copy only the others'
        self._memory.wait_for_all()
        for rank, (part, place) in enumerate(zip(parts, output_tensor.chunk(group.size()), strict=True)):
            if rank != group.rank():
                place.copy_(part)
        # The two memories alternate, so one barrier a gather is enough. Before a rank writes to this memory again, it
        # passes the barrier of the other memory, which all ranks reach only after they have read from this one.
        self._memory, self._other = self._other, self._memory
        return None


class SharedReduceScatter:
    """Reduce-scatter: each rank writes all its gradients to shared memory and adds up its own part of all ranks'."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._memory = SharedMemory(group)
        self._input: Tensor | None = None

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """FSDP calls this twice a reduction: for the input, which lies in shared memory, and then for the output."""
        if self._input is not None:
            return torch.empty(*size, dtype=dtype, device=device)
        parts = self._memory.parts(size[0], dtype)
        self._input = parts[self._memory.group.rank()] if parts else torch.empty(*size, dtype=dtype, device=device)
        return self._input

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work | None:
        assert op == dist.ReduceOp.SUM and not async_op
        self._input = None
        parts = self._memory.parts(input_tensor.numel(), input_tensor.dtype)
        if not parts:
            return _reduce_scatter(output_tensor, input_tensor, op=op, group=group)
        self._memory.wait_for_all()
        first, *others = (part.chunk(group.size())[group.rank()] for part in parts)
        torch.add(first, others[0], out=output_tensor)
        for other in others[1:]:
            output_tensor += other
        self._memory.wait_for_all()  # every rank has read, so the next gradients may be written
        return None
