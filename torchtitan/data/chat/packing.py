"""Packs whole conversations into sequences: each stands in one sequence, or is cut at the end of a whole one.

Of the documents that wait, a sequence takes the one that has waited longest, then always the longest that fits. Plain
text of other sources goes on from sequence to sequence, as everywhere, and fills what is left. So nothing that is
learned is parted from what it answers, and few places stay empty.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from torchtitan.data.cursor import DocumentRef
from torchtitan.data.packing import Packed, Packer
from torchtitan.data.stream import Stream
from torchtitan.models.spec import IGNORED

NUM_WAITING = 32  # documents of a stream that wait for their place; a resumed run reads them again


@dataclass(frozen=True, eq=False)
class Waiting:
    """A document that was read and is not yet wholly placed."""

    tokens: np.ndarray  # negative: not learned
    ref: DocumentRef
    number: int  # of the documents of its source since the saved place
    before: Any  # its source's place before it
    offset: int = 0  # position of the next input, of plain text that goes on

    @property
    def is_whole(self) -> bool:
        return bool(self.tokens[0] < 0)


class ChatPacker(Packer):
    """Packs one stream. Its state is the place of each source before the oldest document that waits, and which wait."""

    def __init__(self, stream: Stream, seq_len: int, pad_id: int) -> None:
        super().__init__(stream, seq_len, pad_id)
        self._waiting: list[Waiting] = []
        self._num_read = [0] * len(self._before["cursors"])  # since the saved place, of each source
        self._has_ended = False

    def state(self) -> dict[str, Any]:
        now = self._stream.state()
        places, num_read, first = list(now["cursors"]), list(self._num_read), {}
        for source in range(len(places)):
            own = [document for document in self._waiting if document.ref.source == source]
            if own:
                oldest = min(own, key=lambda document: document.number)
                places[source], first[source] = oldest.before, oldest.number
                num_read[source] -= oldest.number
            else:
                num_read[source] = 0
        waiting = [[d.ref.source, d.number - first[d.ref.source], d.offset] for d in self._waiting]
        return {**now, "cursors": places, "offset": 0, "read": num_read, "waiting": waiting}

    def load(self, state: dict[str, Any]) -> None:
        self._stream.load(state)
        found = {}
        for source, count in enumerate(state["read"]):
            for number in range(count):
                before = self._stream.state()["cursors"][source]
                document = self._stream.cursors[source].next()  # it was counted when it was read before
                assert document is not None, "a document that waited is gone"
                found[source, number] = Waiting(*document, number, before)
        self._waiting = [replace(found[source, number], offset=offset) for source, number, offset in state["waiting"]]
        self._num_read, self._has_ended = list(state["read"]), False

    def pack(self, inputs: np.ndarray, labels: np.ndarray, document_ids: np.ndarray | None) -> Packed:
        """Fill one sequence; each argument has the shape [S]. What no document fits into is padding."""
        assert document_ids is not None, "conversations are kept apart"
        tokens = self._tokens
        filled, starts, refs = 0, [], []
        while (document := self._choose(len(tokens) - filled)) is not None:
            starts.append(filled)
            refs.append(document.ref)
            part = document.tokens[document.offset : document.offset + len(tokens) - filled]
            tokens[filled : filled + len(part)] = part
            filled += len(part)
            place = self._waiting.index(document)
            if document.offset + len(part) < len(document.tokens):  # the last token is the next sequence's first input
                self._waiting[place] = replace(document, offset=document.offset + len(part) - 1)
            else:
                del self._waiting[place]
        if filled < len(tokens):
            tokens[filled:] = ~self._pad_id
            starts.append(filled)
        inputs[:] = np.where(tokens < 0, ~tokens, tokens)[:-1]
        labels[:] = np.where(tokens < 0, IGNORED, tokens)[1:]
        self._separate(starts, labels, document_ids)
        return Packed(len(labels) if refs else 0, *((refs[0], refs[-1]) if refs else (None, None)))

    def _choose(self, room: int) -> Waiting | None:
        """The next document of the sequence; None: the room stays empty."""
        self._read()
        if room < 2:  # an input and its label
            return None
        if room == len(self._tokens) and self._waiting:
            return self._waiting[0]
        fit = [document for document in self._waiting if len(document.tokens) - document.offset <= room]
        if fit:
            return max(fit, key=lambda document: len(document.tokens) - document.offset)
        return next((document for document in self._waiting if not document.is_whole), None)

    def _read(self) -> None:
        while len(self._waiting) < NUM_WAITING and not self._has_ended:
            before = self._stream.state()["cursors"]
            document = self._stream.next()
            if document is None:
                self._has_ended = True
                return
            source = document[1].source
            if len(document[0]):
                self._waiting.append(Waiting(*document, self._num_read[source], before[source]))
            self._num_read[source] += 1
