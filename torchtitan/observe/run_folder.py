"""The run folder: made and checked before anything else starts; an earlier run's files are kept aside, never mixed."""

import os
from pathlib import Path

from torchtitan.config.schema import Config
from torchtitan.observe.log import logger


def open_run_folder(config: Config, rank: int) -> Path:
    """Make the folder, or refuse one that cannot be written; what an earlier run left there moves to `earlier/N`."""
    folder = Path(config.job.dump_folder)
    if rank != 0:
        return folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".writable.{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ValueError(
            f"job.dump_folder = {str(folder)!r} cannot be written: {error.strerror}; "
            f"choose another with --job.dump_folder, or change its permissions"
        ) from None
    left = [folder / name for name in _names(config) if (folder / name).exists()]
    if left:
        number = 1 + max((int(p.name) for p in (folder / "earlier").glob("*") if p.name.isdecimal()), default=0)
        aside = folder / "earlier" / str(number)
        aside.mkdir(parents=True)
        for path in left:
            path.rename(aside / path.name)
        logger.info(f"kept the earlier run of this folder in {aside}")
    return folder


def _names(config: Config) -> list[str]:
    """What a run writes into its folder."""
    return [
        "config.toml",
        "metrics.jsonl",
        "validation.jsonl",
        "wandb",
        config.metrics.save_tb_folder,
        config.profiling.save_traces_folder,
        config.profiling.save_memory_snapshot_folder,
    ]
