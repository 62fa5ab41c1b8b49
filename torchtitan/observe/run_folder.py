"""Opens the run folder: checks that it can be written, locks it, and moves the files of an earlier run aside."""

import fcntl
import os
import shutil
import socket
from pathlib import Path
from typing import IO

from torchtitan.config.load import to_toml
from torchtitan.config.rules import RECORDS, RUN_FILES, run_folders
from torchtitan.config.schema import Config
from torchtitan.observe.log import logger
from torchtitan.refusal import Refusal


def open_run_folder(config: Config) -> Path:
    """Make the folder; refuse one that cannot be written, it or what an earlier run left in it."""
    folder = Path(config.job.dump_folder)
    kept = run_folders(config).keys() - {"checkpoint.folder"}  # which a `load_only` run may only read
    path = folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in (".", "earlier", *(run_folders(config)[key] for key in kept)):
            if not (path := folder / name).exists():
                continue
            probe = path / f".writable.{os.getpid()}"
            probe.touch()
            probe.unlink()
    except OSError as error:
        inside = "" if path == folder else f": {path.relative_to(folder)}"
        raise Refusal(
            f"job.dump_folder = {str(folder)!r}{inside} cannot be written: {error.strerror}; "
            f"choose another folder, or change its permissions"
        ) from None
    return folder


def claim(folder: Path, option: str = "job.dump_folder") -> IO[str]:
    """Lock the folder for as long as the returned file is open; refuse a folder that another run has locked."""
    file = (folder / ".lock").open("a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        raise Refusal(
            f"{option} = {str(folder)!r} is in use by {file.read().strip() or 'another run'}; "
            f"wait until it ends, or choose another folder"
        ) from None
    except OSError as error:  # for example on Lustre mounted without -o flock
        raise Refusal(
            f"{option} = {str(folder)!r} is on a file system that locks no files ({error.strerror}); "
            f"mount it with locks (Lustre: -o flock), or choose another folder"
        ) from None
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}")
    file.flush()
    return file


def start_record(folder: Path, config: Config, goes_on: bool) -> Path:
    """Write the configuration and return the folder for the records. Call this after the last possible refusal.

    A fresh run moves the files of an earlier run to `earlier/N`. A run that resumes (`goes_on`) keeps them, with three
    exceptions. If it will write `hf`, it moves the old `hf` to `earlier/N`. If it goes back to `load_step`, it copies
    the records so far to `earlier/N`. If it is `load_only`, no run can resume from it, so its records go to
    `load_only/N`.
    """
    checkpoint = config.checkpoint
    moved, copied = [*RUN_FILES, *run_folders(config).values()], []
    if goes_on:
        moved = ["hf"] if checkpoint.last_save_in_hf else []
        copied = RECORDS if checkpoint.load_step >= 0 and not checkpoint.load_only else []
    left = [folder / name for name in [*moved, *copied] if (folder / name).exists()]
    if (link := folder / checkpoint.folder) in left and link.is_symlink():  # the user chose the disk behind it
        left.remove(link)
        if saved := list(link.glob("step-*")):
            aside = _numbered(link / "earlier")
            for path in saved:
                path.rename(aside / path.name)
            logger.info(f"moved the checkpoints in {link}, which is a link, to {aside}")
    if left:
        aside = _numbered(folder / "earlier")
        for path in left:
            shutil.copy2(path, aside) if path.name in copied else path.rename(aside / path.name)
        logger.info(f"moved the earlier run of this folder to {aside}")
    if goes_on and checkpoint.load_only:
        folder = _numbered(folder / "load_only")
        logger.info(f"this run saves nothing, so its records go to {folder}")
    (folder / "config.toml").write_text(to_toml(config), encoding="utf-8")
    return folder


def _numbered(folder: Path) -> Path:
    """Make a subfolder with the next free number."""
    new = folder / str(1 + max((int(path.name) for path in folder.glob("*") if path.name.isdecimal()), default=0))
    new.mkdir(parents=True)
    return new
