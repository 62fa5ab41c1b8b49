"""Folders that a verb writes to: nothing of the user's is overwritten or removed."""

import shutil
from pathlib import Path

from torchtitan.refusal import Refusal

_MARK = ".made_by_torchtitan"


def refuse_existing(folder: str) -> Path:
    """Refuse a target that exists; nothing is overwritten."""
    target = Path(folder)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise Refusal(f"{folder} is there already; remove it, or name another folder")
    return target


def make_empty(folder: Path) -> Path:
    """Make the folder, or empty one that this function made before; returns the file that marks it so."""
    mark = folder / _MARK
    if folder.is_symlink() or (folder.exists() and not mark.exists() and (folder.is_file() or any(folder.iterdir()))):
        raise Refusal(f"{folder} has to be emptied, but was not made by this verb; remove it, or name another folder")
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    mark.touch()
    return mark
