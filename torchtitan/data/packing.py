"""Packs a stream's documents into sequences, without padding and without losing a token.

A sequence is seq_len inputs and seq_len labels, which are the inputs shifted by one. The last label of a sequence is
the first input of the next one, so every token but the stream's first is a label exactly once.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from torchtitan.data.cursor import DocumentRef
from torchtitan.data.stream import Stream
from torchtitan.models.spec import IGNORED


@dataclass(frozen=True)
class Packed:
    """What went into a sequence."""

    num_labels: int  # seq_len, or less if the stream has ended
    first: DocumentRef | None
    last: DocumentRef | None


class Packer:
    """Packs one stream. Between sequences it keeps the current document and how much of it was used."""

    def __init__(self, stream: Stream, seq_len: int, pad_id: int) -> None:
        self._stream, self._pad_id = stream, pad_id
        self._tokens = np.empty(seq_len + 1, np.int32)
        self._document: np.ndarray | None = None
        self._ref: DocumentRef | None = None
        self._before = stream.state()  # the stream's state before it gave the current document
        self._offset = 0  # position of the next input in the current document

    def state(self) -> dict[str, Any]:
        return {**self._before, "offset": self._offset}

    def load(self, state: dict[str, Any]) -> None:
        self._before, self._offset = state, state["offset"]
        self._stream.load(state)
        self._document = None

    def pack(self, inputs: np.ndarray, labels: np.ndarray, document_ids: np.ndarray | None) -> Packed:
        """Fill one sequence; each argument has the shape [S]. If the stream ends early, the rest is padding."""
        tokens = self._tokens
        filled, starts, first = 0, [], None
        while filled < len(tokens):
            if (document := self._open_document()) is None:
                break
            starts.append(filled)
            first = first or self._ref
            count = min(len(tokens) - filled, len(document) - self._offset)
            tokens[filled : filled + count] = document[self._offset : self._offset + count]
            filled += count
            self._offset += count
        if filled:
            self._offset -= 1  # the last token is the first input of the next sequence
        if filled < len(tokens):
            tokens[filled:] = self._pad_id
            starts.append(filled)
        inputs[:] = tokens[:-1]
        labels[:] = tokens[1:]
        if document_ids is not None:
            self._separate(starts, labels, document_ids)
        num_labels = max(filled - 1, 0)
        labels[num_labels:] = IGNORED
        return Packed(num_labels, first, self._ref)

    def _open_document(self) -> np.ndarray | None:
        """The current document, or the next one if the current one is used up."""
        while self._document is None or self._offset >= len(self._document):
            before = self._stream.state()
            document = self._stream.next()
            if document is None:
                return None
            # After load(), _document is None and _offset already belongs to the document that is opened here.
            if self._document is not None:
                self._offset = 0
            self._before, (self._document, self._ref) = before, document
        return self._document

    def _separate(self, starts: list[int], labels: np.ndarray, document_ids: np.ndarray) -> None:
        ends = [*starts[1:], len(labels) + 1]
        for number, (start, end) in enumerate(zip(starts, ends, strict=True)):
            document_ids[start:end] = number
            if start:
                # The last token of a document must not predict the first token of the next.
                labels[start - 1] = IGNORED
