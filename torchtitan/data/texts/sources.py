"""Finds the text that `dataset` or `dataset_path` names, and determines its kind.

Files of an unknown kind and a mix of kinds are refused. An unknown file is never taken for text.
"""

import difflib
from pathlib import Path
from typing import TYPE_CHECKING

from torchtitan.config.schema import Config, DataSource, Training, Validation
from torchtitan.data.texts.documents import Documents, JsonLines, Texts, TokenizedTexts
from torchtitan.data.texts.location import Location
from torchtitan.data.tokenizers.tokenizer import Tokenizer
from torchtitan.observe.log import logger
from torchtitan.refusal import Refusal
from torchtitan.root import ROOT

if TYPE_CHECKING:
    from torchtitan.data.texts.sharded import ShardedTexts

NamesText = Training | Validation | DataSource
SHIPPED_TEXT = ROOT / "tests" / "assets" / "pydocs"
SHIPPED = {"pydocs": "train.jsonl", "pydocs_validation": "validation.jsonl", "c4_test": "train.jsonl"}
HUB: dict[str, tuple[str, str | None, str]] = {
    "c4": ("allenai/c4", "en", "train"),
    "c4_validation": ("allenai/c4", "en", "validation"),
}


def named_texts(config: Config) -> list[tuple[str, NamesText]]:
    """The sections that name a text which a run reads, by their names."""
    training, validation = config.training, config.validation
    named: list[tuple[str, NamesText]] = [("training", training)]
    if training.sources:
        named = [(f"training.sources[{i}]", source) for i, source in enumerate(training.sources)]
    return [*named, ("validation", validation)] if validation.enable else named


def require_text(name: str, section: NamesText) -> None:
    """Refuse a section whose text does not exist. Its content is checked when a loader is built."""
    try:
        locate_text(section.dataset, section.dataset_path)
    except Refusal as error:
        raise Refusal(f"{name}: {error}") from None


def locate_text(dataset: str, dataset_path: str | None) -> Location:
    if dataset_path is not None:
        from torchtitan.data.texts.paths import locate_path

        return locate_path(dataset_path)
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
) -> "Documents | ShardedTexts":
    """Documents by number if the text can be read in any order, otherwise shards of text."""
    location = locate_text(dataset, dataset_path)
    if dataset == "c4_test" and dataset_path is None:
        logger.info(
            f"dataset c4_test is the small text that ships with this repository ({location.name}), not torchtitan's "
            "excerpt of C4"
        )
    if location.kind == "prepared":
        from torchtitan.data.prepared.tokens import PreparedTokens

        return PreparedTokens(location.files[0], tokenizer)
    texts = open_texts(location, text_key)
    texts.identity += getattr(text_key, "identity", "")
    return TokenizedTexts(texts, getattr(text_key, "encoder", tokenizer)) if isinstance(texts, Texts) else texts


def open_texts(location: Location, text_key: str) -> "Texts | ShardedTexts":
    if location.kind == "text" and not any(file.stat().st_size for file in location.files):
        raise Refusal(f"{location.name} is empty; give a file with text in it")
    texts = _open_kind(location, text_key)
    if not (len(texts) if isinstance(texts, Texts) else texts.num_shards):
        raise Refusal(f"{location.name} holds no document; give a source with at least one")
    return texts


def _open_kind(location: Location, text_key: str) -> "Texts | ShardedTexts":
    if location.kind == "jsonl":
        return JsonLines(location.files, text_key)
    from torchtitan.data.texts.document_kinds import SavedDataset, TextFiles

    if location.kind == "text":
        return TextFiles(location.files)
    if location.kind == "saved":
        return SavedDataset(location.files[0], text_key)
    from torchtitan.data.texts.sharded_kinds import HubDataset, ParquetFiles, StreamedJsonLines

    if location.hub is not None:
        return HubDataset(*location.hub, text_key)
    if location.kind == "streamed":
        return StreamedJsonLines(location.files, text_key)
    assert location.kind == "parquet", location.kind
    return ParquetFiles(location.files, text_key)
