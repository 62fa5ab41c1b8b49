"""Prepared tokens: flat files of ids, of offsets and checksums of documents, and meta.json; read memory-mapped.

`prepare` writes meta.json last, so a folder without it is unfinished and refused. Training with a tokenizer that gives
other ids is refused, too.
"""

import json
import zlib
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np

from torchtitan.data.tokenizers.fingerprint import fingerprint
from torchtitan.data.tokenizers.tokenizer import Tokenizer
from torchtitan.refusal import Refusal

FORMAT_VERSION = 2
TOKENS, OFFSETS, CHECKSUMS = "tokens.bin", "documents.bin", "checksums.bin"
META, PLAN = "meta.json", "plan.json"
DTYPES = ("<u2", "<u4")
DAMAGED = "the folder is damaged: copy it again or prepare it again"


@dataclass(frozen=True)
class Meta:
    """The content of `meta.json`."""

    format_version: int
    num_documents: int
    num_tokens: int
    dtype: str
    largest_id: int
    checksums_crc32: int  # of the file of checksums
    vocab_size: int
    tokenizer_sha256: str
    text_key: str
    source: str


def is_prepared(folder: Path) -> bool:
    """Whether `prepare` has written or begun this folder."""
    return (folder / META).is_file() or (folder / PLAN).is_file() or (folder / TOKENS).is_file()


def token_dtype(vocab_size: int) -> str:
    """The smallest unsigned little-endian type that holds every id."""
    return DTYPES[vocab_size > 1 << 16]


class PreparedTokens:
    """Documents by number. They stay in the operating system's page cache, which the ranks of a machine share."""

    def __init__(self, folder: Path, tokenizer: Tokenizer) -> None:
        self.meta = load_meta(folder)
        if self.meta.tokenizer_sha256 != fingerprint(tokenizer):
            raise Refusal(
                f"{folder} was prepared with another tokenizer ({self.meta.vocab_size} ids, this one has "
                f"{tokenizer.vocab_size}); set model.hf_assets_path to that tokenizer, or prepare the text again"
            )
        if self.meta.largest_id >= tokenizer.vocab_size:
            raise Refusal(
                f"{folder} holds the id {self.meta.largest_id}, but the tokenizer has only {tokenizer.vocab_size} ids; "
                "the disk damaged the file during writing: prepare the text again"
            )
        self._folder = folder
        self._offsets = _map(folder / OFFSETS, "<i8", self.meta.num_documents + 1)
        self._tokens = _map(folder / TOKENS, self.meta.dtype, self.meta.num_tokens)
        begins, ends = self._offsets[:-1], self._offsets[1:]
        if self._offsets[0] != 0 or self._offsets[-1] != self.meta.num_tokens or (begins > ends).any():
            raise Refusal(f"{folder / OFFSETS} does not rise from 0 to {self.meta.num_tokens:,}; {DAMAGED}")
        self._checksums = _map(folder / CHECKSUMS, "<u4", self.meta.num_documents)
        about = f"{self.meta.num_documents:,} documents of {self.meta.num_tokens:,} tokens"
        self.identity = f"{about} ({self.meta.checksums_crc32:08x})"

    def __len__(self) -> int:
        return self.meta.num_documents

    def tokens(self, index: int) -> np.ndarray:
        tokens = self._tokens[self._offsets[index] : self._offsets[index + 1]]
        if zlib.crc32(tokens.data) != self._checksums[index]:
            raise Refusal(f"{self._folder / TOKENS}, document {index}: its tokens have changed; {DAMAGED}")
        return tokens

    def describe(self, index: int) -> str:
        return f"{self._folder} document {index}"


def load_meta(folder: Path) -> Meta:
    path = folder / META
    if not path.is_file():
        raise Refusal(
            f"{folder} is only partly prepared ({META} is missing); run the same `python -m torchtitan prepare` "
            "command again to finish it"
        )
    try:
        content = json.loads(path.read_bytes())
    except ValueError:
        content = None
    if not isinstance(content, dict):
        raise Refusal(f"{path} is not a JSON object; {DAMAGED}")
    if content.get("format_version") != FORMAT_VERSION:
        raise Refusal(
            f"{path} has format {content.get('format_version')}, but this version reads {FORMAT_VERSION}; "
            "prepare the text again"
        )
    types = {field.name: field.type for field in fields(Meta)}
    wrong = [name for name in types | content if type(content.get(name)) is not types.get(name)]
    if wrong or content["dtype"] not in DTYPES:
        raise Refusal(f"{path} is not as `prepare` writes it: {', '.join(wrong) or 'dtype'}; {DAMAGED}")
    return Meta(**content)


def _map(path: Path, dtype: str, count: int) -> np.ndarray:
    expected = count * np.dtype(dtype).itemsize
    size = path.stat().st_size if path.is_file() else -1
    if size != expected:
        found = f"has {size:,} bytes" if size >= 0 else "is missing"
        raise Refusal(f"{path} {found}, expected {expected:,}; {DAMAGED}")
    # A plain array over the map, because slicing an np.memmap takes several times as long.
    return np.asarray(np.memmap(path, dtype, mode="r"))
