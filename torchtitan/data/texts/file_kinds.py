"""What kind of text a file holds, by its name or its first bytes. An unknown file is never taken for text."""

from pathlib import Path

from torchtitan.data.texts.location import FileKind
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
