"""Divides documents between training and validation."""

import numpy as np

from torchtitan.data.texts.documents import Documents

_EVERY = 20


class Part:
    """Every 20th document, or all others; of fewer than 20 documents, the last one or all others."""

    def __init__(self, documents: Documents, is_held_out: bool) -> None:
        self._documents, self._is_held_out, self._every = documents, is_held_out, min(_EVERY, len(documents))
        self.identity = f"{documents.identity}, {'only' if is_held_out else 'without'} every {self._every}th"

    def __len__(self) -> int:
        held_out = len(self._documents) // self._every
        return held_out if self._is_held_out else len(self._documents) - held_out

    def index(self, index: int) -> int:
        return (index + 1) * self._every - 1 if self._is_held_out else index + index // max(1, self._every - 1)

    def tokens(self, index: int) -> np.ndarray:
        return self._documents.tokens(self.index(index))

    def describe(self, index: int) -> str:
        return self._documents.describe(self.index(index))
