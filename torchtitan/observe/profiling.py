"""Writes torch profiler traces and CUDA memory snapshots into the run folder, one file per rank, every few steps."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path

import torch

from torchtitan.config.schema import Profiling
from torchtitan.observe.log import logger

_MEMORY_EVENTS = 100_000
Paused = Callable[[], AbstractContextManager]


@contextmanager
def profile(
    config: Profiling, run_folder: Path, rank: int, start_step: int, device: torch.device, paused: Paused
) -> Iterator[Callable[[], None]]:
    """Profile the training inside; call the function that this yields after every step.

    Files are written inside `paused()`, so that the time does not count as training.
    """
    after_a_step: list[Callable[[], None]] = []
    with ExitStack() as stack:
        if config.enable_profiling:
            after_a_step.append(stack.enter_context(_traces(config, run_folder, rank, start_step, device, paused)))
        if config.enable_memory_snapshot:
            after_a_step.append(stack.enter_context(_memory_snapshots(config, run_folder, rank, start_step, paused)))

        def step_ended() -> None:
            for tell in after_a_step:
                tell()

        yield step_ended


@contextmanager
def _traces(
    config: Profiling, run_folder: Path, rank: int, start_step: int, device: torch.device, paused: Paused
) -> Iterator[Callable[[], None]]:
    ended = False

    def save(profiler: torch.profiler.profile) -> None:
        if ended:  # the run ended before the step to record
            return
        folder = run_folder / config.save_traces_folder / f"step_{start_step + profiler.step_num}"
        _write(folder / f"rank{rank}.json", profiler.export_chrome_trace, "profiler trace")

    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    idle = config.profile_freq - config.profiler_warmup - config.profiler_active
    schedule = torch.profiler.schedule(wait=idle, warmup=config.profiler_warmup, active=config.profiler_active)
    with torch.profiler.profile(
        activities=activities, schedule=schedule, on_trace_ready=save, record_shapes=True
    ) as profiler:

        def step_ended() -> None:
            writes = (profiler.step_num + 1) % config.profile_freq == 0
            with paused() if writes else nullcontext():
                profiler.step()

        yield step_ended
        ended = True


@contextmanager
def _memory_snapshots(
    config: Profiling, run_folder: Path, rank: int, start_step: int, paused: Paused
) -> Iterator[Callable[[], None]]:
    step = start_step

    def save(label: str) -> None:
        folder = run_folder / config.save_memory_snapshot_folder / label
        _write(folder / f"rank{rank}.pickle", torch.cuda.memory._dump_snapshot, "memory snapshot")

    def count() -> None:
        nonlocal step
        step += 1
        if step % config.profile_freq == 0:
            with paused():
                save(f"step_{step}")

    torch.cuda.memory._record_memory_history(max_entries=_MEMORY_EVENTS)
    try:
        yield count
    except torch.OutOfMemoryError:
        save("out_of_memory")
        raise
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)


def _write(file: Path, write: Callable[[str], object], what: str) -> None:
    """Write a file, or warn: a full disk must not end the training."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write(str(file))
        file.stat()  # torch raises nothing when it could not write the file
        logger.info(f"wrote a {what} to {file.parent}")
    except OSError as error:
        logger.warning(f"a {what} could not be written to {file.parent}: {error.strerror or error}; continuing")
