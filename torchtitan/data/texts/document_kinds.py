"""More texts that can be read in any order: text files, and a Hugging Face dataset saved with `save_to_disk`."""

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO

from torchtitan.data.texts.documents import describe_files, locate, text_of
from torchtitan.data.texts.fields import names_in
from torchtitan.refusal import Refusal

_MANY_PIECES = 1024  # enough documents for many streams
_LEAST_PIECE_BYTES, _LARGEST_PIECE_BYTES = 2 << 10, 64 << 10


class TextFiles:
    """A short file is one document. A long one is several, cut between paragraphs, else lines, else characters."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._files, self._sizes = files, [path.stat().st_size for path in files]
        self._step = min(max(sum(self._sizes) // _MANY_PIECES, _LEAST_PIECE_BYTES), _LARGEST_PIECE_BYTES)
        self._counts = [max(1, size // self._step) for size in self._sizes]
        self._ends = list(accumulate(self._counts))
        self.identity = f"{len(self):,} documents in {describe_files(files)}"

    def __len__(self) -> int:
        return self._ends[-1]

    def text(self, index: int) -> str:
        number, piece = locate(self._ends, index)
        try:
            with self._files[number].open("rb") as file:
                begin, end = self._cut(file, number, piece), self._cut(file, number, piece + 1)
                file.seek(begin)
                return file.read(end - begin).decode("utf-8" if piece else "utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise Refusal(
                f"{self._files[number]}: cannot be read as UTF-8 text: {error}; convert it to UTF-8 or leave it out"
            ) from error

    def _cut(self, file: BinaryIO, number: int, piece: int) -> int:
        """Where a piece begins: at the first good place after its share of the file, well before the next one's."""
        size, count = self._sizes[number], self._counts[number]
        if piece in (0, count):
            return size if piece else 0
        nominal = size * piece // count
        file.seek(nominal)
        window = file.read(self._step // 2)
        for mark in (b"\n\n", b"\n"):
            if (found := window.find(mark)) >= 0:
                return nominal + found + len(mark)
        return nominal + next((i for i, byte in enumerate(window[:4]) if byte & 0xC0 != 0x80), 0)

    def describe(self, index: int) -> str:
        number, piece = locate(self._ends, index)
        count = self._counts[number]
        return str(self._files[number]) + (f", part {piece + 1} of {count}" if count > 1 else "")


class SavedDataset:
    """A Hugging Face dataset that `save_to_disk` wrote."""

    def __init__(self, folder: Path, text_key: str) -> None:
        import datasets

        try:
            self._dataset: Any = datasets.load_from_disk(str(folder))
        except Exception as error:  # datasets and Arrow raise many kinds for a damaged folder
            raise Refusal(f"{folder}: datasets cannot load it: {error}; save it again with save_to_disk") from error
        columns = names_in(text_key, self._dataset.column_names, lambda: str(folder))
        if missing := [name for name in columns if name not in self._dataset.column_names]:
            raise Refusal(
                f"{folder} has no column {missing[0]!r} (it has {', '.join(self._dataset.column_names)}); set text_key"
            )
        self._dataset = self._dataset.select_columns(columns).with_format(None)
        self._folder, self._text_key = folder, text_key
        files = [Path(file["filename"]) for file in self._dataset.cache_files]
        self.identity = f"{len(self):,} documents in {describe_files(files)}"

    def __len__(self) -> int:
        return len(self._dataset)

    def text(self, index: int) -> str:
        return text_of(self._dataset[index], self._text_key, lambda: self.describe(index))

    def describe(self, index: int) -> str:
        return f"{self._folder} row {index}"
