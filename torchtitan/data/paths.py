"""Finds the files that `dataset_path` means, and their kind. An unknown file is never taken for text."""

import glob
from pathlib import Path

from torchtitan.data.location import FileKind, Location
from torchtitan.refusal import Refusal

COMPRESSED = (".gz", ".bz2", ".xz")
SUFFIXES: dict[str, FileKind] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".parquet": "parquet",
    ".txt": "text",
    ".md": "text",
    ".rst": "text",
}
READABLE = "JSONL (also .gz, .bz2, .xz), Parquet, text (.txt, .md, .rst)"


def locate_path(dataset_path: str) -> Location:
    if "://" in dataset_path:
        from torchtitan.data.remote import locate_url

        return locate_url(dataset_path)
    path = Path(dataset_path).expanduser()
    if path.is_dir():
        from torchtitan.data.prepared import is_prepared

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


def one_kind(dataset_path: str, files: list[Path]) -> FileKind:
    kinds = {file: _file_kind(file) for file in files}
    unknown = [str(file) for file, kind in kinds.items() if kind is None]
    if unknown:
        raise Refusal(
            f"dataset_path = {dataset_path!r} has files of an unknown kind: {', '.join(unknown[:5])}"
            f"{f' and {len(unknown) - 5} more' if len(unknown) > 5 else ''}; give {READABLE}; "
            "a glob such as 'corpus/*.jsonl' leaves other files out"
        )
    found = {kind: file for file, kind in kinds.items() if kind is not None}
    if len(found) > 1:
        examples = ", ".join(f"{kind} ({file})" for kind, file in sorted(found.items()))
        raise Refusal(
            f"dataset_path = {dataset_path!r} mixes kinds of files: {examples}; "
            "give a glob that matches one kind, or one source for each kind ([[training.sources]])"
        )
    return next(iter(found))


def kind_by_name(file: Path) -> FileKind | None:
    if file.suffix in COMPRESSED and SUFFIXES.get(Path(file.stem).suffix) == "jsonl":
        return "streamed"
    return SUFFIXES.get(file.suffix)


def _file_kind(file: Path) -> FileKind | None:
    if (kind := kind_by_name(file)) is not None:
        return kind
    try:
        with file.open("rb") as opened:
            head = opened.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()
    except OSError as error:
        raise Refusal(f"{file} cannot be read: {error.strerror}; correct dataset_path or the permissions") from error
    if head.startswith(b"PAR1"):
        return "parquet"
    return "jsonl" if head.startswith(b"{") else None


def _hidden(file: Path, folder: Path) -> bool:
    return any(part.startswith((".", "_")) for part in file.relative_to(folder).parts)
