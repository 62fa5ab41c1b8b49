"""Saves a run's tensors, completely or not at all, and finds and loads the newest complete checkpoint.

The checkpointer sees named tensors, never a model. Every rank calls the same methods in the same order, and a failure
on one rank is raised on all ranks.
"""

import re
import time
from collections.abc import Callable
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

from torchtitan.checkpoint.storage import UNFINISHED, Manifest, Storage
from torchtitan.config.schema import Checkpoint
from torchtitan.observe.log import logger
from torchtitan.refusal import Refusal

_TIMEOUT = timedelta(hours=1)  # longest wait for a rank that is still writing
Tensors = dict[str, Tensor]


class SaveError(Refusal):
    """A save failed that must not: the last one, or any with `on_failure = "stop"`."""


class Checkpointer:
    """Call `save` after each step where `due` returns True, and `wait` at the end."""

    def __init__(self, config: Checkpoint, storage: Storage, about: dict[str, Any], start_seconds: int) -> None:
        """`about` goes into every manifest; `start_seconds` limits the wait for other ranks when the run starts."""
        self.config, self.storage, self.about = config, storage, about
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        # An asynchronous save uses collectives while training uses others, so it needs its own process group.
        self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=start_seconds))
        _set_pg_timeout(_TIMEOUT, self.group)
        self._began, self._bytes, self.last_step = time.monotonic(), 0, -1
        self._best = -1  # the newest step that a save has called the best and that is complete: it is kept
        self._writing: Future[None] | None = None
        self._copies: Tensors = {}  # in host memory, which each save uses again
        for name in [] if config.load_only else self.on_rank_0(storage.sweep):
            logger.info(f"removed {name}, a checkpoint that an earlier run did not finish writing")

    def is_time_up(self) -> bool:
        """Whether this rank's clock says that `interval_minutes` have passed; one such rank makes all ranks save.

        Also True if an asynchronous save failed and must end the run: the next save raises its error.
        """
        if self._writing is not None and self._writing.done() and self._writing.exception() is not None:
            return True
        minutes = self.config.interval_minutes
        return minutes is not None and time.monotonic() - self._began > 60 * minutes

    def due(self, step: int, time_is_up: bool) -> bool:
        first = self.config.enable_first_step_checkpoint and step == 1
        return not self.config.load_only and (first or time_is_up or step % self.config.interval == 0)

    def save(self, step: int, tensors: Tensors, run: dict[str, Any]) -> None:
        """Write a checkpoint, or copy the tensors and write them asynchronously; an earlier write ends first."""
        self.wait()
        self._began = time.monotonic()
        self._warn_of_a_full_disk()
        if self.config.async_mode == "disabled":
            self._try_write(step, tensors, run)
            return
        from torchtitan.checkpoint.asynchronous import copy_to_host, start_thread

        pinned = self.config.async_mode == "async_with_pinned_mem" and torch.cuda.is_available()
        copied = copy_to_host(tensors, self._copies, pinned)
        seconds = time.monotonic() - self._began
        logger.info(f"step {step}: copied the checkpoint in {seconds:.2f} s; writing it asynchronously")
        self._writing = start_thread(lambda: self._try_write(step, copied, run))

    def wait(self) -> None:
        """Wait until the asynchronous save is complete; raises if it failed and may not."""
        if self._writing is not None:
            writing, self._writing = self._writing, None
            writing.result()

    def _try_write(self, step: int, tensors: Tensors, run: dict[str, Any]) -> None:
        """Log a failure, or raise it if `on_failure = "stop"`; every rank does the same."""
        begin = time.monotonic()
        try:
            self._write(step, tensors, run)
        except (Exception, CheckpointException) as error:  # from a disk, a server, or another rank
            reason = " ".join(str(_cause(error)).split()) or type(error).__name__
            if self.config.on_failure == "stop":
                raise SaveError(f'saving step {step} failed: {reason} (checkpoint.on_failure = "stop")') from error
            free = self.storage.free_bytes()  # torch's error does not say whether the disk is full
            self._tidy(self.storage.sweep)  # after measuring: the log shows the space that this save had
            if self.rank == 0:
                room = f" ({free / 2**20:,.0f} MiB are free there)" if free is not None else ""
                logger.error(f"saving step {step} failed: {reason}{room}; training continues and saves again when due")
            return
        self.last_step = step
        logger.info(f"saved step {step}: {self._bytes / 2**20:,.1f} MiB in {time.monotonic() - begin:.2f} s")
        best = run.get("best", {}).get("step", -1)
        if best == step or self._best < 0:
            self._best = best
        self._tidy(lambda: self._retain(step))

    def _tidy(self, remove: Callable[[], object]) -> None:
        """Rank 0 removes files that are no longer needed; if it cannot, the run continues with a warning."""
        try:
            self.on_rank_0(remove)
        except Exception as error:  # clients of object stores raise their own types
            logger.warning(f"old checkpoints could not be removed: {error}; training continues")

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
        """Run `work` on every rank and return every rank's result; an error on one rank is raised on all."""
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
        """Run `work` on rank 0 and return its result on all ranks."""
        return self._all(lambda: work() if self.rank == 0 else None)[0]

    def _retain(self, newest: int) -> None:
        """Keep the newest `keep_latest_k` complete checkpoints, the best, and each that another process is reading."""
        keep = self.config.keep_latest_k
        older = [step for step in self.storage.steps() if step <= newest] if keep else []
        complete = [step for step in older if isinstance(self.storage.examine(step), Manifest)]
        for step in complete[keep:]:
            if step != self._best and not self.storage.remove_unread(step):
                logger.info(f"kept the checkpoint of step {step} for now: another process is reading it")

    def _warn_of_a_full_disk(self) -> None:
        free = self.storage.free_bytes() if self.rank == 0 and self._bytes else None
        if free is not None and free < 1.1 * self._bytes:
            logger.warning(
                f"{self.storage.url} has {free / 2**20:,.0f} MiB free, a checkpoint takes {self._bytes / 2**20:,.0f}; "
                "make room, or lower checkpoint.keep_latest_k"
            )

    def find(self, storage: Storage, step: int = -1) -> Manifest | None:
        """The newest complete checkpoint, or the one of this step; the log lists each one it skipped, and why."""
        try:
            return self._find(storage, step)
        except OSError as error:  # a refusal on one rank, raised on all
            raise Refusal(re.sub("^rank \\d+: ", "", str(error))) from None

    def _find(self, storage: Storage, step: int) -> Manifest | None:
        candidates = self.on_rank_0(storage.steps)
        damaged = False
        if step >= 0:
            if step not in candidates:
                found = ", ".join(map(str, candidates)) or "none"
                raise Refusal(f"step {step} is not in {storage.url}, which has {found}; name one of those, or no step")
            candidates = [step]
        for candidate in candidates:
            manifest = self._examine(storage, candidate)
            if isinstance(manifest, Manifest):
                return manifest
            if step >= 0:
                raise Refusal(f"step {step} in {storage.url} cannot be loaded: {manifest}; name another step")
            if self.rank == 0:
                logger.warning(f"skipped the checkpoint of step {candidate}: {manifest}")
            damaged = damaged or storage.is_local or manifest != UNFINISHED  # on a disk, a save renames what is whole
        if damaged:  # a run that starts again would replace them
            found = ", ".join(map(str, candidates))
            raise Refusal(
                f"{storage.url} has checkpoints (steps {found}), but none can be used, for the reasons above; repair "
                "one, or start again in another job.dump_folder"
            )
        return None

    def _examine(self, storage: Storage, step: int) -> Manifest | str:
        """The manifest, or what is wrong with the checkpoint; each rank verifies its share of the files."""
        manifest: Manifest | str = self.on_rank_0(lambda: storage.examine(step))
        if isinstance(manifest, str):
            return manifest
        share = sorted(manifest.files)[self.rank :: self.world_size]
        faults = self._all(lambda: storage.faults(manifest, share))
        away = [rank for rank, found in enumerate(faults) if any(fault.endswith(" is missing") for fault in found)]
        if away and isinstance(self.on_rank_0(lambda: storage.examine(step)), Manifest):
            raise Refusal(
                f"step {step} in {storage.url} is complete where rank 0 runs, but not where rank {away[0]} does: "
                f"{faults[away[0]][0]}; put checkpoint.folder where all nodes share it"
            )
        return "; ".join(fault for found in faults for fault in found) or manifest

    def shapes(self, storage: Storage, step: int) -> dict[str, torch.Size]:
        """Names and shapes of all tensors in a checkpoint."""
        metadata = storage.reader(step).read_metadata().state_dict_metadata
        return {name: kind.size for name, kind in metadata.items() if isinstance(kind, TensorStorageMetadata)}

    def holds_only_weights(self, storage: Storage, step: int) -> bool:
        return not any(name.startswith("optimizer.") for name in self.shapes(storage, step))

    def leave_behind(self, step: int) -> None:
        """Rename the checkpoints after a step that the run goes back to, so that no later start resumes from them."""

        def set_aside() -> list[str]:
            return [self.storage.set_aside(later) for later in self.storage.steps() if later > step]

        for name in [] if self.config.load_only else self.on_rank_0(set_aside):
            logger.info(f"renamed a checkpoint that was saved after step {step} to {name}")

    def load(self, storage: Storage, step: int, tensors: Tensors) -> None:
        """Fill the tensors, keeping their sharding; any layout may have saved them."""
        from torchtitan.checkpoint.reading import another_model, differences, unknown

        shapes = self.shapes(storage, step)
        wrong = list(dict.fromkeys(name for part in self._all(lambda: differences(shapes, tensors)) for name in part))
        if wrong := wrong + unknown(shapes, tensors, self.group):
            manifest = storage.examine(step)
            saved = manifest.config["model"] if isinstance(manifest, Manifest) else {}
            raise another_model(f"step {step} in {storage.url}", wrong, saved, self.about["config"]["model"])
        with storage.reading(step):
            dcp.load(tensors, storage_reader=storage.reader(step), process_group=self.group)


def _cause(error: BaseException) -> BaseException:
    """The error of the rank that failed, without the CheckpointException that torch wraps it in."""
    failures = getattr(error, "failures", None)
    return next(iter(failures.values()))[0] if failures else error
