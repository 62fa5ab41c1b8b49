"""Texts that are read forwards, shard by shard: JSON lines (compressed or remote), Parquet, and datasets of a hub."""

import bz2
import gzip
import json
import lzma
import zlib
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from torchtitan.data.texts.documents import LONGEST_LINE, describe_files, parse_line, text_of
from torchtitan.data.texts.fields import names_in
from torchtitan.data.texts.sharded import ShardedTexts, ShardReader
from torchtitan.refusal import Refusal

# What unpacks an open file, and the shell command that tests it.
COMPRESSIONS: dict[str, tuple[Callable[[Any], Any], str]] = {
    ".gz": (gzip.open, "gzip -t"),
    ".bz2": (bz2.open, "bzip2 -t"),
    ".xz": (lzma.open, "xz -t"),
}
PARQUET_ROWS = 256  # rows to decode at a time
PARQUET_BUFFER_BYTES = 1 << 20


class StreamedJsonLines(ShardedTexts):
    """Each file is one shard."""

    def __init__(self, files: Sequence[Path], text_key: str) -> None:
        self.num_shards, self._files, self._text_key = len(files), files, text_key
        self.identity = f"{len(files):,} files of {describe_files(files)}"

    def open(self, shard: int, state: int | None) -> ShardReader:
        path, begin = self._files[shard], state or 0
        unpack, test = COMPRESSIONS.get(path.suffix, (lambda file: file, ""))
        hint = f"; it may be incomplete or damaged: test it with `{test} {path}`" if test else ""

        def text(line: bytes, number: int) -> str | None:
            return parse_line(line, self._text_key, lambda: f"{path}:{number}", hint) if line.strip() else None

        return _CountingReader(islice(_read_lines(path, unpack, hint), begin, None), begin, text)

    def describe(self, shard: int, number: int) -> str:
        return f"{self._files[shard]} document {number}"


class _CountingReader(ShardReader):
    """Reads the lines or rows of a shard, of which `num_read` lie before the first."""

    def __init__(self, items: Iterator[Any], num_read: int, text: Callable[[Any, int], str | None]) -> None:
        """`text` makes the text of an item, given its number from 1; None for a blank line."""
        self._items, self._num_read, self._text = items, num_read, text

    def next(self) -> str | None:
        for item in self._items:
            self._num_read += 1
            if (text := self._text(item, self._num_read)) is not None:
                return text
        return None

    def state(self) -> int:
        return self._num_read


def _read_lines(path: Path, unpack: Callable[[Any], Any], hint: str) -> Iterator[bytes]:
    try:
        with path.open("rb") as packed, unpack(packed) as file:
            while line := file.readline(LONGEST_LINE + 1):
                yield line
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        raise Refusal(f"{path} cannot be read: {error}{hint or '; resume from the last checkpoint'}") from error


class ParquetFiles(ShardedTexts):
    """Each row group is one shard, because reading can begin at a row group."""

    def __init__(self, files: Sequence[Path], text_key: str) -> None:
        import pyarrow.parquet

        self._text_key = text_key
        self._groups: list[tuple[Path, int, int]] = []  # file, row group, number of its first row
        num_all_rows = 0
        for path in files:
            try:
                metadata = pyarrow.parquet.read_metadata(_source(path))
            except (OSError, pyarrow.ArrowException) as error:
                raise Refusal(f"{path} cannot be read as Parquet: {error}; copy or download it again") from error
            names = metadata.schema.to_arrow_schema().names
            if missing := [name for name in names_in(text_key, names, path.__str__) if name not in names]:
                raise Refusal(f"{path} has no column {missing[0]!r} (it has {', '.join(names)}); set text_key")
            first_row = 0
            for group in range(metadata.num_row_groups):
                if num_rows := metadata.row_group(group).num_rows:
                    self._groups.append((path, group, first_row))
                    first_row += num_rows
                    num_all_rows += num_rows
        self.num_shards = len(self._groups)
        self.identity = f"{num_all_rows:,} rows in {self.num_shards:,} row groups of {describe_files(files)}"

    def open(self, shard: int, state: int | None) -> ShardReader:
        def text(row: Any, number: int) -> str:
            return text_of(row, self._text_key, lambda: self.describe(shard, number - 1))

        return _CountingReader(self._read_rows(shard, state or 0), state or 0, text)

    def _read_rows(self, shard: int, first: int) -> Iterator[Any]:
        """Rows from `first` on, decoded some at a time: a row group is large, and each stream reads one."""
        import pyarrow.parquet

        path, group, _ = self._groups[shard]
        begin = 0
        try:
            with pyarrow.parquet.ParquetFile(_source(path), buffer_size=PARQUET_BUFFER_BYTES, pre_buffer=False) as file:
                columns = names_in(self._text_key, file.schema_arrow.names, path.__str__)
                for batch in file.iter_batches(PARQUET_ROWS, row_groups=[group], columns=columns):
                    if begin + len(batch) > first:
                        yield from batch.slice(max(first - begin, 0)).to_pylist()
                    begin += len(batch)
        except (OSError, UnicodeDecodeError, pyarrow.ArrowException) as error:
            raise Refusal(
                f"{path} row group {group} cannot be read: {error}; copy or download the file again"
            ) from error

    def describe(self, shard: int, number: int) -> str:
        path, _, first_row = self._groups[shard]
        return f"{path} row {first_row + number}"


def _source(path: Path) -> Any:
    """What Arrow opens itself, which is faster, or an open file."""
    return path if isinstance(path, Path) else path.open("rb")


class HubDataset(ShardedTexts):
    """A dataset that is streamed from the Hugging Face hub. Each of its files is one shard."""

    def __init__(self, repo: str, config: str | None, split: str, text_key: str) -> None:
        self.name, self._text_key = f"{repo}{f' ({config})' if config else ''} {split}", text_key
        try:
            self._dataset = load_hub_dataset(repo, config, split)
        except Exception as error:  # datasets, huggingface_hub and the network raise many kinds of errors
            raise Refusal(
                f"dataset {self.name!r} cannot be opened: {type(error).__name__}: {error}\n"
                "  no network: set dataset_path to a local copy; gated or private: accept its terms and set HF_TOKEN; "
                "several configurations: set dataset = 'owner/name:config' or 'owner/name:config:split'"
            ) from error
        self.num_shards: int = self._dataset.num_shards
        self.identity = f"{self.name} in {self.num_shards:,} shards"

    def open(self, shard: int, state: Sequence[Any] | None) -> ShardReader:
        dataset = self._dataset.shard(num_shards=self.num_shards, index=shard)
        return _HubReader(dataset, state, self._text_key, lambda number: self.describe(shard, number))

    def describe(self, shard: int, number: int) -> str:
        return f"{self.name}, shard {shard} of {self.num_shards}, document {number}"


class _HubReader(ShardReader):
    def __init__(
        self, dataset: Any, state: Sequence[Any] | None, text_key: str, describe: Callable[[int], str]
    ) -> None:
        if state is not None:
            dataset.load_state_dict(json.loads(state[1]))
        self._begin, self._rows_read = state, state[0] if state is not None else 0
        self._dataset, self._rows, self._text_key, self._describe = dataset, iter(dataset), text_key, describe

    def next(self) -> str | None:
        try:
            row = next(self._rows, None)
        except Exception as error:  # as above, and what parsers raise for a damaged file
            raise Refusal(
                f"{self._where()} cannot be read: {type(error).__name__}: {error}; resume from the last checkpoint"
            ) from error
        if row is None:
            return None
        if missing := [name for name in names_in(self._text_key, row, self._where) if name not in row]:
            found = ", ".join(row)
            raise Refusal(f"{self._where()}: no field {missing[0]!r} (it has {found}); set text_key")
        text = text_of(row, self._text_key, self._where)
        self._rows_read += 1
        return text

    def _where(self) -> str:
        return self._describe(self._rows_read)

    def state(self) -> list[Any]:
        if self._begin is not None and self._rows_read == self._begin[0]:
            return list(self._begin)  # after load_state_dict, datasets reports its place only once it has read a row
        return [self._rows_read, json.dumps(self._dataset.state_dict())]  # JSON: only datasets knows its structure


def load_hub_dataset(repo: str, config: str | None, split: str) -> Any:
    """Open the stream. A test replaces this function to read local files."""
    import datasets

    return datasets.load_dataset(repo, config, split=split, streaming=True)
