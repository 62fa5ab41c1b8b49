"""Saves a run's tensors, complete or not at all, and finds the newest complete ones again; sees no model, only names.

All ranks call alike. What goes wrong on one rank is known to all of them before any goes on.
"""

import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.tensor import DTensor

from torchtitan.checkpoint.storage import Manifest, Storage
from torchtitan.config.schema import Checkpoint
from torchtitan.observe.log import logger
from torchtitan.refusal import Refusal

_TIMEOUT = timedelta(hours=1)  # of what ranks tell each other while one of them writes
Tensors = dict[str, Tensor]


class SaveError(Refusal):
    """A save that configuration or circumstances do not allow to fail has failed."""


class Checkpointer:
    """`save` after a step where `due` says so; `wait` for the last one."""

    def __init__(self, config: Checkpoint, storage: Storage, about: dict[str, Any], start_seconds: int) -> None:
        """`about`: what each manifest says besides step and files; `start_seconds`: longest wait for other ranks."""
        self.config, self.storage, self.about = config, storage, about
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        # A group of its own: a save runs beside the training.
        self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=start_seconds))
        _set_pg_timeout(_TIMEOUT, self.group)
        self._began, self._bytes, self.last_step = time.monotonic(), 0, -1
        self._writing: Future[None] | None = None
        self._copies: Tensors = {}  # in host memory that is kept from save to save
        for name in [] if config.load_only else self.on_rank_0(storage.sweep):
            logger.info(f"removed {name}, which an earlier run did not finish")

    def is_time_up(self) -> bool:
        """Whether `interval_minutes` are over by this rank's clock; all ranks save once any rank's are.

        Also where a write behind the training has failed and is to end the run, which the next save does.
        """
        if self._writing is not None and self._writing.done() and self._writing.exception() is not None:
            return True
        minutes = self.config.interval_minutes
        return minutes is not None and time.monotonic() - self._began > 60 * minutes

    def due(self, step: int, time_is_up: bool) -> bool:
        first = self.config.enable_first_step_checkpoint and step == 1
        return not self.config.load_only and (first or time_is_up or step % self.config.interval == 0)

    def save(self, step: int, tensors: Tensors, run: dict[str, Any]) -> None:
        """Write a checkpoint now, or copy and write it behind the training; an earlier write is waited for."""
        self.wait()
        self._began = time.monotonic()
        self._warn_of_a_full_disk()
        if self.config.async_mode == "disabled":
            self._try_write(step, lambda: self._write(step, tensors, run))
            return
        copied = {name: self._copy(name, tensor) for name, tensor in tensors.items()}
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds = time.monotonic() - self._began
        logger.info(f"step {step}: copied the checkpoint in {seconds:.2f} s, writing it behind the training")
        self._writing = Future()
        # A daemon: where another rank is gone it waits for it, and must not keep this process from ending.
        threading.Thread(target=self._write_behind, args=(self._writing, step, copied, run), daemon=True).start()

    def _copy(self, name: str, tensor: Tensor) -> Tensor:
        """Not by torch's stager: torch 2.11's can be used once."""
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        copy = self._copies.get(name)
        if copy is None or (copy.shape, copy.dtype) != (local.shape, local.dtype):
            pinned = self.config.async_mode == "async_with_pinned_mem" and torch.cuda.is_available()
            copy = self._copies[name] = torch.empty_like(local, device="cpu", pin_memory=pinned)
        copy.copy_(local, non_blocking=True)
        return DTensor(copy, tensor._spec, requires_grad=False) if isinstance(tensor, DTensor) else copy

    def _write_behind(self, done: Future[None], step: int, tensors: Tensors, run: dict[str, Any]) -> None:
        try:
            self._try_write(step, lambda: self._write(step, tensors, run))
            done.set_result(None)
        except BaseException as error:
            done.set_exception(error)

    def wait(self) -> None:
        """Until what is being written behind the training is there, or has failed."""
        if self._writing is not None:
            writing, self._writing = self._writing, None
            writing.result()

    def _try_write(self, step: int, write: Callable[[], None]) -> None:
        """A failure is logged, or raised where `on_failure` says so, on all ranks alike."""
        begin = time.monotonic()
        try:
            write()
        except (Exception, CheckpointException) as error:  # of a disk, a server, another rank's disk
            reason = " ".join(str(_cause(error)).split()) or type(error).__name__
            if self.config.on_failure == "stop":
                raise SaveError(f'saving step {step} failed: {reason} (checkpoint.on_failure = "stop")') from error
            free = self.storage.free_bytes()  # torch's own error does not say that a disk is full
            self._tidy(self.storage.sweep)  # only now: the log shows the room this save had, the next one needs it
            if self.rank == 0:
                room = f" ({free / 2**20:,.0f} MiB are free there)" if free is not None else ""
                logger.error(f"saving step {step} failed: {reason}{room}; training goes on, the next save is a new try")
            return
        self.last_step = step
        logger.info(f"saved step {step}: {self._bytes / 2**20:,.1f} MiB in {time.monotonic() - begin:.2f} s")
        self._tidy(lambda: self._retain(step))

    def _tidy(self, remove: Callable[[], object]) -> None:
        """Remove what is not needed, on rank 0; where that fails, the run is none the worse for it."""
        try:
            self.on_rank_0(remove)
        except Exception as error:  # a store's client has errors of its own
            logger.warning(f"checkpoints could not be removed: {error}")

    def _write(self, step: int, tensors: Tensors, run: dict[str, Any]) -> None:
        storage, folder = self.storage, self.storage.being_written(step)
        dcp.save(tensors, storage_writer=storage.writer(step), process_group=self.group)

        def describe_own() -> dict[str, tuple[int, int]]:
            own = (f"__{self.rank}_", ".") if self.rank == 0 else f"__{self.rank}_"
            return storage.describe(folder, [name for name in storage.names(folder) if name.startswith(own)])

        files: dict[str, tuple[int, int]] = {}
        for described in self._all(describe_own):
            files |= described
        self._bytes = sum(size for size, _ in files.values())
        manifest = Manifest(step, files, run=run, **self.about)
        self.on_rank_0(lambda: storage.complete(manifest))

    def _all(self, work: Callable[[], Any]) -> list[Any]:
        """What each rank's work gives; where it fails on any, it fails on all."""
        mine: tuple[Any, str | None]
        try:
            mine = work(), None
        except Exception as error:
            mine = None, f"rank {self.rank}: {error}"
        everyone: list[Any] = [None] * self.world_size
        dist.all_gather_object(everyone, mine, group=self.group)
        if errors := [error for _, error in everyone if error]:
            raise OSError("; ".join(errors))
        return [answer for answer, _ in everyone]

    def on_rank_0(self, work: Callable[[], Any]) -> Any:
        """What rank 0's work gives, on all ranks."""
        return self._all(lambda: work() if self.rank == 0 else None)[0]

    def _retain(self, newest: int) -> None:
        """Keep the latest complete ones; never what somebody reads, never the one just written."""
        keep = self.config.keep_latest_k
        older = [step for step in self.storage.steps() if step <= newest] if keep else []
        complete = [step for step in older if isinstance(self.storage.examine(step), Manifest)]
        for step in complete[keep:]:
            if not self.storage.remove_unread(step):
                logger.info(f"step {step} is being read by somebody; it is kept for now")

    def _warn_of_a_full_disk(self) -> None:
        free = self.storage.free_bytes() if self.rank == 0 and self._bytes else None
        if free is not None and free < 1.1 * self._bytes:
            logger.warning(
                f"{self.storage.url} has {free / 2**20:,.0f} MiB free, a checkpoint takes {self._bytes / 2**20:,.0f}; "
                "make room, or lower checkpoint.keep_latest_k"
            )

    def find(self, storage: Storage, step: int = -1) -> Manifest | None:
        """The newest complete checkpoint, or that of this step; what is passed over is said, and why."""
        candidates = self.on_rank_0(storage.steps)
        if step >= 0:
            if step not in candidates:
                found = ", ".join(map(str, candidates)) or "none"
                raise Refusal(f"step {step} is not in {storage.url}, which has {found}; use one it has, or none")
            candidates = [step]
        for candidate in candidates:
            manifest = self._examine(storage, candidate)
            if isinstance(manifest, Manifest):
                return manifest
            if step >= 0:
                raise Refusal(f"step {step} in {storage.url} cannot be loaded: {manifest}; use another step")
            if self.rank == 0:
                logger.warning(f"passed over the checkpoint of step {candidate}: {manifest}")
        return None

    def _examine(self, storage: Storage, step: int) -> Manifest | str:
        """The manifest, or what is wrong; each rank reads its share of the files."""
        manifest: Manifest | str = self.on_rank_0(lambda: storage.examine(step))
        if isinstance(manifest, str):
            return manifest
        share = sorted(manifest.files)[self.rank :: self.world_size]
        faults = self._all(lambda: storage.faults(manifest, share))
        away = [rank for rank, found in enumerate(faults) if any(fault.endswith(" is missing") for fault in found)]
        if away and isinstance(self.on_rank_0(lambda: storage.examine(step)), Manifest):
            raise Refusal(
                f"step {step} in {storage.url} is complete where rank 0 runs, but not where rank {away[0]} does: "
                f"{faults[away[0]][0]}; all nodes must share the folder"
            )
        return "; ".join(fault for found in faults for fault in found) or manifest

    def shapes(self, storage: Storage, step: int) -> dict[str, torch.Size]:
        """Names and shapes of all tensors in a checkpoint."""
        metadata = storage.reader(step).read_metadata().state_dict_metadata
        return {name: kind.size for name, kind in metadata.items() if isinstance(kind, TensorStorageMetadata)}

    def leave_behind(self, step: int) -> None:
        """Set aside what was saved after a step that the run goes back to: a later start must not go on from there."""

        def set_aside() -> list[str]:
            return [self.storage.set_aside(later) for later in self.storage.steps() if later > step]

        for name in [] if self.config.load_only else self.on_rank_0(set_aside):
            logger.info(f"kept {name}, which was saved after step {step}, aside")

    def load(self, storage: Storage, step: int, tensors: Tensors) -> None:
        """Fill the tensors, sharded as they are, whatever layout has saved them."""
        shapes = self.shapes(storage, step)
        wrong = [f"{name} is not in it" for name in tensors if name not in shapes]
        wrong += [
            f"{name} is {list(shapes[name])} there, {list(tensor.shape)} here"
            for name, tensor in tensors.items()
            if name in shapes and shapes[name] != tensor.shape
        ]
        wrong = list(dict.fromkeys(name for part in self._all(lambda: wrong) for name in part))
        wrong += [f"{name} is nowhere here" for name in self._unknown(shapes, tensors)]
        if wrong:
            more = f", and {len(wrong) - 20} more" if len(wrong) > 20 else ""
            raise Refusal(
                f"the checkpoint of step {step} in {storage.url} is of another model, or not whole: "
                f"{'; '.join(wrong[:20])}{more}; set model.flavor to its model, go on from another step "
                "(checkpoint.load_step), or begin elsewhere (job.dump_folder, or checkpoint.initial_load_path)"
            )
        with storage.reading(step):
            dcp.load(tensors, storage_reader=storage.reader(step), process_group=self.group)

    def _unknown(self, shapes: Iterable[str], tensors: Tensors) -> list[str]:
        """What a checkpoint holds of the model, and of its optimizer if that is loaded, but no rank has."""
        kinds = {name.partition(".")[0] for name in tensors} - {"data"}  # streams may be fewer now
        names = [name for name in shapes if name.partition(".")[0] in kinds]
        known = torch.tensor([name in tensors for name in names], dtype=torch.int32)
        dist.all_reduce(known, dist.ReduceOp.MAX, group=self.group)
        return [name for name, is_known in zip(names, known.tolist(), strict=True) if not is_known]


def _cause(error: BaseException) -> BaseException:
    """What went wrong on a rank, out of what torch has wrapped it in."""
    failures = getattr(error, "failures", None)
    return next(iter(failures.values()))[0] if failures else error
