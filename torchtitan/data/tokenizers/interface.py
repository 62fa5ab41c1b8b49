"""What every tokenizer does: texts to ids and back, for documents and for prompts."""

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

PIECE_CHARS = 1 << 20  # a longer text is encoded in pieces
_LAST_CHARS = 1 << 16  # of a piece, in which it is cut
_LINE_END = re.compile(r"\S\n(?=\S)")


class Tokenizer(ABC):
    """Several threads may share a tokenizer."""

    kind: str
    vocab_size: int  # rows that an embedding needs: the largest id + 1
    bos_token: str | None
    bos_id: int | None
    eos_token: str
    eos_id: int
    file_sha256: str = ""

    @abstractmethod
    def _encode(self, text: str) -> list[int]: ...

    @abstractmethod
    def _encode_batch(self, texts: list[str]) -> list[list[int]]: ...

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """The text without control tokens: exactly what was encoded, with or without BOS and EOS."""

    @abstractmethod
    def encode_prompt(self, text: str, as_trained: bool = False) -> list[int]:
        """The ids that transformers gives for the text with this tokenizer's folder.

        With `as_trained`, the ids begin as training begins a document: with BOS if the tokenizer has one, and with
        nothing else. transformers does the same with the exported folder (see prompts.py).
        """

    def encode(self, text: str, bos: bool, eos: bool) -> list[int]:
        """The ids of a document. `bos` adds nothing if the tokenizer has no BOS (`bos_id` is None)."""
        return self._frame(self._encode(encodable(text)), bos, eos)

    def encode_batch(self, texts: list[str], bos: bool, eos: bool) -> list[list[int]]:
        """The same ids as `encode` of each text, computed on several cores."""
        if max(map(len, texts), default=0) > PIECE_CHARS:
            return [self.encode(text, bos, eos) for text in texts]
        return [self._frame(ids, bos, eos) for ids in self._encode_batch([encodable(text) for text in texts])]

    def _frame(self, ids: list[int], bos: bool, eos: bool) -> list[int]:
        if bos and self.bos_id is not None:
            ids.insert(0, self.bos_id)
        if eos:
            ids.append(self.eos_id)
        return ids


def encodable(text: str) -> str:
    """Replace half of a surrogate pair, which JSON can contain but UTF-8 cannot encode, by U+FFFD."""
    try:
        text.encode()
        return text
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def pieces(text: str) -> Iterator[str]:
    """A text in pieces that need little memory, each cut after a line if there is one; a short text as it is."""
    begin = 0
    while len(text) - begin > PIECE_CHARS:
        end = begin + PIECE_CHARS
        lines = [found.end() for found in _LINE_END.finditer(text, end - _LAST_CHARS, end + 1)]
        yield text[begin : (end := lines[-1] if lines else end)]
        begin = end
    yield text[begin:]
