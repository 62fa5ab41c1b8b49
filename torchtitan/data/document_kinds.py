"""More texts that can be read in any order: text files, and a Hugging Face dataset saved with `save_to_disk`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchtitan.data.documents import LONGEST_TEXT, check_text, describe_files, too_long
from torchtitan.refusal import Refusal


class TextFiles:
    """Each file is one document."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._files = files
        self.identity = f"{len(files):,} documents in {describe_files(files)}"

    def __len__(self) -> int:
        return len(self._files)

    def text(self, index: int) -> str:
        if self._files[index].stat().st_size > 4 * LONGEST_TEXT:
            raise too_long(str(self._files[index]))
        try:
            text = self._files[index].read_bytes().decode("utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise Refusal(
                f"{self._files[index]}: cannot be read as UTF-8 text: {error}; convert it to UTF-8 or leave it out"
            ) from error
        return check_text(text, "", lambda: self.describe(index))

    def describe(self, index: int) -> str:
        return str(self._files[index])


class SavedDataset:
    """A Hugging Face dataset that `save_to_disk` wrote."""

    def __init__(self, folder: Path, text_key: str) -> None:
        import datasets

        try:
            self._dataset: Any = datasets.load_from_disk(str(folder))
        except Exception as error:  # datasets and Arrow raise many kinds for a damaged folder
            raise Refusal(f"{folder}: datasets cannot load it: {error}; save it again with save_to_disk") from error
        if text_key not in self._dataset.column_names:
            raise Refusal(
                f"{folder} has no column {text_key!r} (it has {', '.join(self._dataset.column_names)}); set text_key"
            )
        self._dataset = self._dataset.select_columns([text_key]).with_format(None)
        self._folder, self._text_key = folder, text_key
        files = [Path(file["filename"]) for file in self._dataset.cache_files]
        self.identity = f"{len(self):,} documents in {describe_files(files)}"

    def __len__(self) -> int:
        return len(self._dataset)

    def text(self, index: int) -> str:
        return check_text(self._dataset[index][self._text_key], self._text_key, lambda: self.describe(index))

    def describe(self, index: int) -> str:
        return f"{self._folder} row {index}"
