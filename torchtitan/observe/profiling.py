"""torch profiler traces and CUDA memory snapshots, every so many steps, one file a rank in the run folder."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import torch

from torchtitan.config.schema import Profiling
from torchtitan.observe.log import logger

_MEMORY_EVENTS = 100_000


class Profiler(Protocol):
    """Something that is told when a step has ended."""

    def step(self) -> None: ...


@contextmanager
def profile(
    config: Profiling, run_folder: Path, rank: int, start_step: int, device: torch.device
) -> Iterator[Profiler]:
    """Profile what runs inside; call `step()` after every training step."""
    with _traces(config, run_folder, rank, start_step, device) as traces:
        with _memory_snapshots(config, run_folder, rank, start_step, device) as snapshots:
            yield _All([traces, snapshots])


class _All:
    def __init__(self, parts: list[Profiler | None]) -> None:
        self._parts = [part for part in parts if part is not None]

    def step(self) -> None:
        for part in self._parts:
            part.step()


@contextmanager
def _traces(
    config: Profiling, run_folder: Path, rank: int, start_step: int, device: torch.device
) -> Iterator[Profiler | None]:
    if not config.enable_profiling:
        yield None
        return

    ended = False

    def save(profiler: torch.profiler.profile) -> None:
        if ended:  # the run ended before the step to record
            return
        folder = run_folder / config.save_traces_folder / f"step_{start_step + profiler.step_num}"
        folder.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(folder / f"rank{rank}.json"))
        logger.info(f"wrote a profiler trace to {folder}")

    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    idle = config.profile_freq - config.profiler_warmup - config.profiler_active
    schedule = torch.profiler.schedule(wait=idle, warmup=config.profiler_warmup, active=config.profiler_active)
    with torch.profiler.profile(
        activities=activities, schedule=schedule, on_trace_ready=save, record_shapes=True
    ) as profiler:
        yield profiler
        ended = True


@contextmanager
def _memory_snapshots(
    config: Profiling, run_folder: Path, rank: int, start_step: int, device: torch.device
) -> Iterator[Profiler | None]:
    if not config.enable_memory_snapshot:
        yield None
        return
    assert device.type == "cuda", "refused in build.check_environment"
    torch.cuda.memory._record_memory_history(max_entries=_MEMORY_EVENTS)
    snapshots = _MemorySnapshots(run_folder / config.save_memory_snapshot_folder, rank, start_step, config.profile_freq)
    try:
        yield snapshots
    except torch.OutOfMemoryError:
        snapshots.save("out_of_memory")
        raise
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)


class _MemorySnapshots:
    def __init__(self, folder: Path, rank: int, start_step: int, freq: int) -> None:
        self._folder, self._rank, self._step, self._freq = folder, rank, start_step, freq

    def step(self) -> None:
        self._step += 1
        if self._step % self._freq == 0:
            self.save(f"step_{self._step}")

    def save(self, label: str) -> None:
        folder = self._folder / label
        folder.mkdir(parents=True, exist_ok=True)
        torch.cuda.memory._dump_snapshot(str(folder / f"rank{self._rank}.pickle"))
        logger.info(f"wrote a memory snapshot to {folder}")
