"""Texts that can be read in any order, of which JSON lines are one kind; for others see document_kinds.py.

A line that is not a JSON object with text in it is an error that names the file and the line. Nothing is repaired.
"""

import bisect
import contextlib
import errno
import hashlib
import json
import mmap
import resource
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from torchtitan.data.texts.fields import compose, names_in
from torchtitan.data.tokenizers.tokenizer import Tokenizer
from torchtitan.refusal import Refusal

INDEX_BLOCK_BYTES = 64 << 20
LONGEST_TEXT = 32 << 20  # characters; encoding takes some 40 bytes for each
LONGEST_LINE = 256 << 20  # bytes
_END_BYTES = 4096


@runtime_checkable
class Texts(Protocol):
    """Documents by number, as text."""

    identity: str  # number, size and digest of the documents; a resumed run compares it

    def __len__(self) -> int: ...

    def text(self, index: int) -> str: ...

    def describe(self, index: int) -> str: ...


@runtime_checkable
class Documents(Protocol):
    """Documents by number, as tokens. Each begins with BOS, if the tokenizer has one, and ends with EOS."""

    identity: str

    def __len__(self) -> int: ...

    def tokens(self, index: int) -> np.ndarray: ...

    def describe(self, index: int) -> str: ...


class TokenizedTexts:
    """Tokenizes each text when it is read."""

    def __init__(self, texts: Texts, tokenizer: Tokenizer) -> None:
        self._texts, self._tokenizer = texts, tokenizer
        self.describe, self.identity = texts.describe, texts.identity

    def __len__(self) -> int:
        return len(self._texts)

    def tokens(self, index: int) -> np.ndarray:
        return np.array(self._tokenizer.encode(self._texts.text(index), bos=True, eos=True), dtype=np.int32)


class JsonLines:
    """Each line is one JSON object. Blank lines are skipped."""

    def __init__(self, files: Sequence[Path], text_key: str) -> None:
        self._files, self._text_key = files, text_key
        allow_open_files(len(files))
        self._maps = [map_file(path) for path in files]
        indexes = [index_lines(data) for data in self._maps]
        self._starts = [starts for starts, _ in indexes]
        self._numbers = [numbers for _, numbers in indexes]
        self._ends = list(accumulate(len(starts) for starts in self._starts))
        self.identity = f"{len(self):,} documents in {describe_files(files)}"

    def __len__(self) -> int:
        return self._ends[-1]

    def text(self, index: int) -> str:
        file, row = locate(self._ends, index)
        data, start = self._maps[file], int(self._starts[file][row])
        return parse_line(line_at(data, start), self._text_key, lambda: self.describe(index))

    def describe(self, index: int) -> str:
        file, row = locate(self._ends, index)
        return f"{self._files[file]}:{self._numbers[file][row]}"


def locate(ends: Sequence[int], index: int) -> tuple[int, int]:
    """Which part holds document `index`, and its number within the part; `ends` are the parts' ends."""
    part = bisect.bisect_right(ends, index)
    return part, index - (ends[part - 1] if part else 0)


def allow_open_files(count: int) -> None:
    """Raise the soft limit on open files by `count`, up to the hard limit. Each mapped file keeps a descriptor open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY:
        wanted = soft + count if hard == resource.RLIM_INFINITY else min(soft + count, hard)
        with contextlib.suppress(ValueError, OSError):  # macOS reports a higher limit than it grants
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def map_file(path: Path) -> mmap.mmap | bytes:
    try:
        with path.open("rb") as file:
            # mmap refuses an empty file.
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if path.stat().st_size else b""
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> Refusal:
    fix = "correct dataset_path or the permissions"
    if error.errno in (errno.EMFILE, errno.ENFILE):
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        fix = f"the limit is {limit} (ulimit -n); join the text into fewer, larger files, or prepare it"
    return Refusal(f"{path} cannot be read: {error.strerror}; {fix}")


def describe_files(files: Sequence[Path]) -> str:
    """Size and a digest of names, sizes and both ends of each file: swapped or changed files are another text."""
    digest, size = hashlib.sha256(), 0
    for path in files:
        length = path.stat().st_size
        ends = _both_ends(path, length) if isinstance(path, Path) else (path.version,)
        digest.update(repr((path.name, length, *ends)).encode())
        size += length
    return f"{size:,} bytes ({digest.hexdigest()[:8]})"


def _both_ends(path: Path, length: int) -> tuple[bytes, bytes]:
    try:
        with path.open("rb") as file:
            head = file.read(_END_BYTES)
            file.seek(max(0, length - _END_BYTES))
            return head, file.read(_END_BYTES)
    except OSError as error:
        raise _unreadable(path, error) from error


def index_lines(data: mmap.mmap | bytes) -> tuple[np.ndarray, np.ndarray]:
    """The start offset and the number, from 1, of every line that is not blank."""
    if not len(data):
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    view = np.frombuffer(data, np.uint8)
    newlines = [
        np.flatnonzero(view[begin : begin + INDEX_BLOCK_BYTES] == ord("\n")) + begin
        for begin in range(0, len(view), INDEX_BLOCK_BYTES)
    ]
    starts = np.concatenate([np.zeros(1, np.int64), *(block + 1 for block in newlines)])
    if starts[-1] == len(view):
        starts = starts[:-1]
    keep = np.ones(len(starts), bool)
    for row in np.flatnonzero(np.isin(view[starts], list(b" \t\r\n"))).tolist():
        keep[row] = bool(line_at(data, int(starts[row])).strip())
    return starts[keep], np.flatnonzero(keep) + 1


def line_at(data: mmap.mmap | bytes, start: int) -> bytes:
    end = data.find(b"\n", start, start + LONGEST_LINE + 1)
    return data[start : end if end >= 0 else start + LONGEST_LINE + 1]


def parse_line(line: bytes, text_key: str, where: Any, hint: str = "") -> str:
    """The text of one JSON line. Errors begin with `where()`; if the line is not JSON, the error ends with `hint`."""
    if len(line) > LONGEST_LINE:
        raise too_long(where())
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise Refusal(
            f"{where()}: not JSON ({error}); expected one object per line, such as "
            f'{{"{text_key}": "..."}}, and found {line[:60].decode(errors="replace")!r}{hint}'
        ) from error
    if not isinstance(record, dict):
        raise Refusal(f"{where()}: expected a JSON object with the key {text_key!r}, found {type(record).__name__}")
    if missing := [name for name in names_in(text_key, record, where) if name not in record]:
        keys = ", ".join(map(repr, record)) or "none"
        raise Refusal(f"{where()}: no key {missing[0]!r} (its keys: {keys}); set text_key")
    return text_of(record, text_key, where)


def text_of(row: Mapping[str, Any], text_key: str, where: Any) -> str:
    value = compose(row, text_key, where)
    if not isinstance(value, str):
        raise Refusal(f"{where()}: {text_key!r} holds {type(value).__name__}, not text; correct it or set text_key")
    if len(value) > LONGEST_TEXT:
        raise too_long(where())
    return value


def too_long(where: str) -> Refusal:
    return Refusal(f"{where}: more than {LONGEST_TEXT >> 20} Mi characters in one document; cut it into several")
