"""Turns a conversation into tokens, of which those that are not learned are marked, and counts what it cut or dropped.

A token that is not learned is stored as its bitwise complement, which is negative, so that a conversation travels as
one array. Its first token always is: nothing stands before it. A conversation that is too long for a sequence is cut
at its end; one without a learned token left is dropped, that is, becomes an empty array.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torchtitan.data.chat.spans import SpanFinder
from torchtitan.data.chat.spelling import Speller
from torchtitan.data.tokenizers.interface import Tokenizer
from torchtitan.observe.log import logger
from torchtitan.refusal import Refusal

_MOST_DROPPED = 1000  # conversations in a row


class Example(NamedTuple):
    """A conversation as the model sees it: with `seq_len` inputs at most, and whether each token is learned."""

    ids: list[int]
    learned: list[bool]
    num_tokens: int  # before it was cut
    num_straddling: int = 0  # tokens that a learned part shares with what is not learned
    others_open: int = 0

    @property
    def is_cut(self) -> bool:
        return len(self.ids) < self.num_tokens


@dataclass
class Counts:
    """Of what was read so far."""

    conversations: int = 0
    cut: int = 0
    dropped: int = 0
    straddling: int = 0
    others_open: int = 0

    def add(self, example: Example) -> None:
        self.conversations += 1
        self.dropped += not any(example.learned)
        self.cut += example.is_cut and any(example.learned)
        self.straddling += example.num_straddling
        self.others_open += example.others_open


class ChatEncoder(Tokenizer):
    """Takes a tokenizer's place for the conversations of a source; the texts are those of rows.py."""

    def __init__(self, name: str, tokenizer: Tokenizer, speller: Speller, finder: SpanFinder, seq_len: int) -> None:
        self.kind, self.vocab_size, self.file_sha256 = tokenizer.kind, tokenizer.vocab_size, tokenizer.file_sha256
        self.bos_token, self.bos_id = tokenizer.bos_token, tokenizer.bos_id
        self.eos_token, self.eos_id = tokenizer.eos_token, tokenizer.eos_id
        self.name, self.speller, self.finder, self.seq_len = name, speller, finder, seq_len
        self.counts, self._tokenizer, self._in_a_row = Counts(), tokenizer, 0

    def example(self, text: str) -> Example:
        found = self.finder.find(json.loads(text))
        spelled = self.speller.spell(found.text)
        learned = [False] * len(spelled.ids)
        straddling = 0
        for span in found.spans:
            own, across = spelled.tokens_of(*span)
            straddling += across
            learned[own.start : own.stop] = [True] * len(own)
        learned[:1] = [False]
        most = self.seq_len + 1  # the last one is only a label
        ids, learned = spelled.ids[:most], learned[:most]
        return Example(ids, learned, len(spelled.ids), straddling, found.others_open)

    def encode(self, text: str, bos: bool, eos: bool) -> list[int]:
        example = self.example(text)
        self.counts.add(example)
        self._in_a_row = 0 if any(example.learned) else self._in_a_row + 1
        self._report(example)
        if not any(example.learned):
            return []
        return [token if is_learned else ~token for token, is_learned in zip(example.ids, example.learned, strict=True)]

    def _report(self, example: Example) -> None:
        """Log what was lost, ever more rarely, and refuse data of which nothing is left."""
        counts = self.counts
        number = counts.cut + counts.dropped
        if example.is_cut and number & (number - 1) == 0:  # a power of two
            logger.info(f"{self.name}: {describe(counts, self.seq_len)}")
        if self._in_a_row == _MOST_DROPPED:
            raise Refusal(
                f"{self.name}: {_MOST_DROPPED:,} conversations in a row lost all that is learned, because it stands "
                f"behind the first {self.seq_len} tokens; raise seq_len"
            )

    def _encode(self, text: str) -> list[int]:
        return self.encode(text, bos=False, eos=False)

    def _encode_batch(self, texts: list[str]) -> list[list[int]]:
        return [self._encode(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids)

    def encode_prompt(self, text: str, as_trained: bool = False) -> list[int]:
        return self._tokenizer.encode_prompt(text, as_trained)


def describe(counts: Counts, seq_len: int) -> str:
    return (
        f"of {counts.conversations:,} conversations so far, {counts.cut:,} were cut after {seq_len} tokens, so that an "
        f"answer lacks its end, and {counts.dropped:,} were dropped because nothing learned was left"
    )
