"""Finds the text that `dataset` or `dataset_path` names, and determines its kind.

Files of an unknown kind and a mix of kinds are refused. An unknown file is never taken for text.
"""

import difflib
import glob
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from torchtitan.data.documents import Documents, JsonLines, Texts, TokenizedTexts
from torchtitan.data.sharded import ShardedTexts
from torchtitan.data.tokenizer import Tokenizer
from torchtitan.observe.log import logger
from torchtitan.refusal import Refusal

Kind = Literal["jsonl", "compressed", "parquet", "text", "saved", "prepared", "hub"]
FileKind = Literal["jsonl", "compressed", "parquet", "text"]

COMPRESSED = (".gz", ".bz2", ".xz")
SHIPPED_TEXT = Path(__file__).parents[2] / "tests" / "assets" / "pydocs"
SHIPPED = {"pydocs": "train.jsonl", "pydocs_validation": "validation.jsonl", "c4_test": "train.jsonl"}
HUB: dict[str, tuple[str, str | None, str]] = {
    "c4": ("allenai/c4", "en", "train"),
    "c4_validation": ("allenai/c4", "en", "validation"),
}
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


@dataclass(frozen=True)
class Location:
    """Where a text is: its kind, and its files or its repository on the hub."""

    kind: Kind
    files: tuple[Path, ...] = ()
    hub: tuple[str, str | None, str] | None = None

    @property
    def name(self) -> str:
        return self.hub[0] if self.hub else str(self.files[0]) + (" ..." if len(self.files) > 1 else "")


def locate_text(dataset: str, dataset_path: str | None) -> Location:
    if dataset_path is not None:
        return _locate_path(dataset_path)
    if dataset in SHIPPED:
        file = SHIPPED_TEXT / SHIPPED[dataset]
        if not file.is_file():
            raise Refusal(
                f"dataset = {dataset!r} needs {file}, which is missing; run in a clone of the repository, or set "
                "dataset_path to your own text"
            )
        return Location("jsonl", (file,))
    if dataset in HUB:
        return Location("hub", hub=HUB[dataset])
    if Path(dataset).exists():
        raise Refusal(f"dataset = {dataset!r} is a path; set dataset_path to that path (dataset is then only a label)")
    repo, _, rest = dataset.partition(":")
    config, _, split = rest.partition(":")
    if repo.count("/") == 1 and all(repo.split("/")) and not repo.startswith("."):
        return Location("hub", hub=(repo, config or None, split or "train"))
    known = sorted(SHIPPED | HUB)
    nearest = difflib.get_close_matches(dataset, known, n=1)
    hint = f"did you mean {nearest[0]!r}? Otherwise " if nearest else ""
    raise Refusal(
        f"dataset = {dataset!r} is not a name known here; {hint}use one of {', '.join(known)}, "
        "a Hugging Face dataset 'owner/name', or set dataset_path to local data"
    )


def open_source(
    dataset: str, dataset_path: str | None, text_key: str, tokenizer: Tokenizer
) -> Documents | ShardedTexts:
    """Documents by number if the text can be read in any order, otherwise shards of text."""
    location = locate_text(dataset, dataset_path)
    if dataset == "c4_test" and dataset_path is None:
        logger.info(
            f"dataset c4_test is the small text that ships with this repository ({location.name}), not torchtitan's "
            "excerpt of C4"
        )
    if location.kind == "prepared":
        from torchtitan.data.prepared import PreparedTokens

        return PreparedTokens(location.files[0], tokenizer)
    texts = open_texts(location, text_key)
    return texts if isinstance(texts, ShardedTexts) else TokenizedTexts(texts, tokenizer)


def open_texts(location: Location, text_key: str) -> Texts | ShardedTexts:
    texts = _open_kind(location, text_key)
    if not (texts.num_shards if isinstance(texts, ShardedTexts) else len(texts)):
        raise Refusal(f"{location.name} holds no document; give a source with at least one")
    return texts


def _open_kind(location: Location, text_key: str) -> Texts | ShardedTexts:
    if location.kind == "jsonl":
        return JsonLines(location.files, text_key)
    from torchtitan.data.document_kinds import SavedDataset, TextFiles

    if location.kind == "text":
        return TextFiles(location.files)
    if location.kind == "saved":
        return SavedDataset(location.files[0], text_key)
    from torchtitan.data.sharded_kinds import CompressedJsonLines, HubDataset, ParquetFiles

    if location.hub is not None:
        return HubDataset(*location.hub, text_key)
    if location.kind == "compressed":
        return CompressedJsonLines(location.files, text_key)
    assert location.kind == "parquet", location.kind
    return ParquetFiles(location.files, text_key)


def _locate_path(dataset_path: str) -> Location:
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
    return Location(_one_kind(dataset_path, files), tuple(files))


def _one_kind(dataset_path: str, files: list[Path]) -> FileKind:
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
        return "compressed"
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
