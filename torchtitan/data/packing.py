"""Packs a stream's documents into sequences, without padding and without loss.

A sequence is seq_len inputs and, shifted by one, seq_len labels. The last token of one is the first input of the
next, so every token (but a stream's very first) is a label exactly once.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from torchtitan.data.stream import DocumentRef, Stream

IGNORED_LABEL = -100


@dataclass(frozen=True)
class Packed:
    """What went into a sequence."""

    num_labels: int  # less than seq_len only where the stream ended
    first: DocumentRef | None
    last: DocumentRef | None


class Packer:
    """One stream's packing remainder: a document, and how much of it was used."""

    def __init__(self, stream: Stream, seq_len: int, pad_id: int) -> None:
        self._stream, self._pad_id = stream, pad_id
        self._tokens = np.empty(seq_len + 1, np.int32)
        self._document: np.ndarray | None = None
        self._ref: DocumentRef | None = None
        self._before = stream.state()  # the stream before it gave the current document
        self._offset = 0  # of the next input in the current document

    def state(self) -> dict[str, Any]:
        return {**self._before, "offset": self._offset}

    def load(self, state: dict[str, Any]) -> None:
        self._before, self._offset = state, state["offset"]
        self._stream.load(state)
        self._document = None

    def pack(self, inputs: np.ndarray, labels: np.ndarray, document_ids: np.ndarray | None) -> Packed:
        """Fills one sequence, each argument [S]; where the stream ends early, the rest is padding."""
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
        labels[num_labels:] = IGNORED_LABEL
        return Packed(num_labels, first, self._ref)

    def _open_document(self) -> np.ndarray | None:
        """The current document, or the next where that one is used up."""
        while self._document is None or self._offset >= len(self._document):
            before = self._stream.state()
            document = self._stream.next()
            if document is None:
                return None
            # After load() the offset is into the document that is opened here.
            if self._document is not None:
                self._offset = 0
            self._before, (self._document, self._ref) = before, document
        return self._document

    def _separate(self, starts: list[int], labels: np.ndarray, document_ids: np.ndarray) -> None:
        ends = [*starts[1:], len(labels) + 1]
        for number, (start, end) in enumerate(zip(starts, ends, strict=True)):
            document_ids[start:end] = number
            if start:
                # its label would have the last token of one document predict the next's first
                labels[start - 1] = IGNORED_LABEL
