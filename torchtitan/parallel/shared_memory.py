"""FSDP's gathers and reductions between ranks of one machine's CPU: through memory that all of them see, not sockets.

The same sums as gloo's; what it costs beside computing falls to a third (docs/performance.md). These are the objects
that FSDP2's `set_custom_all_gather` and `set_custom_reduce_scatter` take.
"""

import mmap
import os
import secrets
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan.observe.log import logger

# torch 2.13 warns of the older names, 2.11 has no others.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
_FOLDER = "/dev/shm"  # files that are memory; Linux has it


class SharedMemory:
    """A part for each rank of a group, which all of them see; it grows when more is asked for."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self._bytes: Tensor | None = torch.empty(0, dtype=torch.uint8)

    def parts(self, numel: int, dtype: torch.dtype) -> list[Tensor]:
        """Room for so many elements of each rank, or none where there is not so much; all ranks ask for the same."""
        size = -(-numel * dtype.itemsize // mmap.PAGESIZE) * mmap.PAGESIZE
        if self._bytes is not None and len(self._bytes) < size * self.group.size():
            self._bytes = None  # freed first
            self._bytes = self._map(size * self.group.size())
        if self._bytes is None:
            return []
        return [part[: numel * dtype.itemsize].view(dtype) for part in self._bytes.split(size)[: self.group.size()]]

    def wait_for_all(self) -> None:
        """Until every rank is here; what it has written is then seen by the others."""
        dist.barrier(self.group)

    def _map(self, size: int) -> Tensor | None:
        """New memory of all ranks, or of none; once mapped, nothing of it is left behind however they end."""
        makes = self.group.rank() == 0
        names = [f"torchtitan-{secrets.token_hex(8)}"]
        mine = self._map_file(names[0], size, os.O_CREAT | os.O_EXCL) if makes else None
        try:
            dist.broadcast_object_list(names, group=self.group, group_src=0)
            if not makes:
                mine = self._map_file(names[0], size, 0)
            failures = torch.tensor(int(mine is None))
            dist.all_reduce(failures, group=self.group)
        finally:
            if makes and mine is not None:
                os.unlink(os.path.join(_FOLDER, names[0]))
        if makes and failures:
            logger.info(
                f"FSDP communicates through sockets: {int(failures)} of {self.group.size()} ranks have no "
                f"{size / 2**20:.0f} MiB of {_FOLDER} in common with rank {dist.get_rank()}"
            )
        return None if failures else mine

    @staticmethod
    def _map_file(name: str, size: int, flags: int) -> Tensor | None:
        try:
            file = os.open(os.path.join(_FOLDER, name), os.O_RDWR | flags, 0o600)
        except OSError:  # another machine, or another system
            return None
        try:
            os.posix_fallocate(file, 0, size)  # without the room, who writes there would be killed
            return torch.frombuffer(mmap.mmap(file, size), dtype=torch.uint8)
        except OSError:
            if flags:
                os.unlink(os.path.join(_FOLDER, name))
            return None
        finally:
            os.close(file)


class SharedGather:
    """All-gather: each rank writes its part to the shared memory and reads the others'."""

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
        parts[group.rank()].copy_(input_tensor)  # a slice of output_tensor, so only the others' are copied there
        self._memory.wait_for_all()
        for rank, (part, place) in enumerate(zip(parts, output_tensor.chunk(group.size()), strict=True)):
            if rank != group.rank():
                place.copy_(part)
        # The two memories alternate. Before a rank writes to this one again it has met all others at the other's
        # barrier, which they reach only after reading from this one.
        self._memory, self._other = self._other, self._memory
        return None


class SharedReduceScatter:
    """Reduce-scatter: each rank writes all its gradients to the shared memory and adds up its part of everyone's."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._memory = SharedMemory(group)
        self._input: Tensor | None = None

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Called twice a reduction: for its input, placed in the shared memory at once, then for its output."""
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
        self._memory.wait_for_all()  # before the next ones are written
        return None


class ReduceScatterOfOne:
    """On one rank: input and output are one tensor, so FSDP's copy from one to the other does nothing."""

    def __init__(self) -> None:
        self._input: Tensor | None = None

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Called twice a reduction; on a GPU the second time in FSDP's own stream, which goes on using the tensor."""
        output, self._input = self._input, None
        if output is None:
            output = self._input = torch.empty(*size, dtype=dtype, device=device)
        elif output.is_cuda:
            output.record_stream(torch.cuda.current_stream(output.device))
        return output

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, *_args: object, **_options: object) -> None:
        raise AssertionError("FSDP does not reduce over one rank")
