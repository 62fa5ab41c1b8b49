"""torch profiler traces and CUDA memory snapshots, every so many steps, one file a rank in the run folder."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

from torchtitan.config.schema import Profiling
from torchtitan.observe.log import logger

_MEMORY_EVENTS = 100_000


@contextmanager
def profile(
    config: Profiling, run_folder: Path, rank: int, start_step: int, device: torch.device
) -> Iterator[Callable[[], None]]:
    """Profile what runs inside; what is given is to be called after every training step."""
    after_a_step: list[Callable[[], None]] = []
    with ExitStack() as stack:
        if config.enable_profiling:
            after_a_step.append(stack.enter_context(_traces(config, run_folder, rank, start_step, device)))
        if config.enable_memory_snapshot:
            assert device.type == "cuda", "refused in build.check_environment"
            after_a_step.append(stack.enter_context(_memory_snapshots(config, run_folder, rank, start_step)))

        def step_ended() -> None:
            for tell in after_a_step:
                tell()

        yield step_ended


@contextmanager
def _traces(
    config: Profiling, run_folder: Path, rank: int, start_step: int, device: torch.device
) -> Iterator[Callable[[], None]]:
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
        yield profiler.step
        ended = True


@contextmanager
def _memory_snapshots(config: Profiling, run_folder: Path, rank: int, start_step: int) -> Iterator[Callable[[], None]]:
    step = start_step

    def save(label: str) -> None:
        folder = run_folder / config.save_memory_snapshot_folder / label
        folder.mkdir(parents=True, exist_ok=True)
        torch.cuda.memory._dump_snapshot(str(folder / f"rank{rank}.pickle"))
        logger.info(f"wrote a memory snapshot to {folder}")

    def count() -> None:
        nonlocal step
        step += 1
        if step % config.profile_freq == 0:
            save(f"step_{step}")

    torch.cuda.memory._record_memory_history(max_entries=_MEMORY_EVENTS)
    try:
        yield count
    except torch.OutOfMemoryError:
        save("out_of_memory")
        raise
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
