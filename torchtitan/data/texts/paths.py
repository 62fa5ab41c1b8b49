"""Finds the files that `dataset_path` means."""

import glob
from pathlib import Path

from torchtitan.data.texts.file_kinds import READABLE, one_kind
from torchtitan.data.texts.location import Location
from torchtitan.refusal import Refusal


def locate_path(dataset_path: str) -> Location:
    if "://" in dataset_path:
        from torchtitan.data.texts.remote import locate_url

        return locate_url(dataset_path)
    path = Path(dataset_path).expanduser()
    if path.is_dir():
        from torchtitan.data.prepared.tokens import is_prepared

        if is_prepared(path):
            return Location("prepared", (path,))
        if (path / "dataset_dict.json").is_file():
            splits = sorted(str(entry) for entry in path.iterdir() if entry.is_dir())
            raise Refusal(f"dataset_path = {dataset_path!r} holds several splits; give one: {', '.join(splits)}")
        if (path / "dataset_info.json").is_file() and (path / "state.json").is_file():
            return Location("saved", (path,))
        files = [file for file in sorted(path.rglob("*")) if file.is_file() and not _hidden(file, path)]
        if not files:
            raise Refusal(f"dataset_path = {dataset_path!r} is a folder without files; give a folder with {READABLE}")
    elif path.is_file():
        files = [path]
    elif path.exists():
        raise Refusal(f"dataset_path = {dataset_path!r} is neither a file nor a folder; give {READABLE}")
    else:
        found = [Path(name) for name in sorted(glob.glob(str(path), recursive=True))]
        files = [file for file in found if file.is_file()]
        if found and not files:
            raise Refusal(
                f"dataset_path = {dataset_path!r} matches only folders: {', '.join(map(str, found[:5]))}; "
                "give one of them, or a glob that matches files"
            )
        if not files:
            raise Refusal(
                f"dataset_path = {dataset_path!r}: no file matches (relative paths begin at {Path.cwd()}); "
                "give a file, a folder or a glob such as 'corpus/*.jsonl'"
            )
    return Location(one_kind(dataset_path, files), tuple(files))


def _hidden(file: Path, folder: Path) -> bool:
    return any(part.startswith((".", "_")) for part in file.relative_to(folder).parts)
