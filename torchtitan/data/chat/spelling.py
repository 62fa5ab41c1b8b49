"""The tokens of a text in which control tokens count as such, with the characters that each token stands for."""

from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from torchtitan.data.tokenizers.interface import Tokenizer
from torchtitan.data.tokenizers.tokenizer import HuggingFaceTokenizer
from torchtitan.refusal import Refusal


class Spelled(NamedTuple):
    """Ids, and the first character of each and the one behind its last."""

    ids: list[int]
    begins: list[int]
    ends: list[int]

    def tokens_of(self, begin: int, end: int) -> tuple[range, int]:
        """The tokens that hold a character of this part, and how many of these hold others, too."""
        found = range(bisect_right(self.ends, begin), bisect_left(self.begins, end))
        edges = {found[0], found[-1]} if found else set()
        return found, sum(self.begins[token] < begin or self.ends[token] > end for token in edges)


class Speller(ABC):
    """Spells as transformers' apply_chat_template does with the same folder."""

    control: dict[str, int]  # control tokens and their ids

    @abstractmethod
    def spell(self, text: str) -> Spelled: ...

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """The text with its control tokens."""


class _HuggingFace(Speller):
    def __init__(self, tokenizer: HuggingFaceTokenizer) -> None:
        import tokenizers

        # The post-processor would leave spaces out of the characters that a token stands for, and adds no id here.
        self._tokenizer: Any = tokenizers.Tokenizer.from_str(tokenizer.prompt_tokenizer.to_str())
        self._tokenizer.encode_special_tokens = tokenizer.prompt_tokenizer.encode_special_tokens
        self._tokenizer.post_processor = None
        added = self._tokenizer.get_added_tokens_decoder()
        self.control = {token.content: number for number, token in added.items() if token.special}

    def spell(self, text: str) -> Spelled:
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        begins, ends = zip(*encoding.offsets, strict=True) if encoding.offsets else ((), ())
        return Spelled(encoding.ids, list(begins), list(ends))

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)


class _Tiktoken(Speller):
    def __init__(self, encoding: Any) -> None:
        self._encoding = encoding
        self.control = {token: encoding.encode_single_token(token) for token in encoding.special_tokens_set}

    def spell(self, text: str) -> Spelled:
        ids = self._encoding.encode(text, allowed_special="all")
        sizes = [len(self._encoding.decode_single_token_bytes(token)) for token in ids]
        characters = np.repeat(np.arange(len(text)), [len(character.encode()) for character in text])  # of each byte
        ends = np.cumsum(sizes, dtype=int)
        begins = ends - sizes
        return Spelled(ids, characters[begins].tolist(), (characters[ends - 1] + 1).tolist())

    def decode(self, ids: Sequence[int]) -> str:
        return self._encoding.decode(list(ids))


def build_speller(tokenizer: Tokenizer) -> Speller:
    if isinstance(tokenizer, HuggingFaceTokenizer):
        return _HuggingFace(tokenizer)
    if tokenizer.kind == "tiktoken":
        return _Tiktoken(tokenizer._encoding)  # type: ignore[attr-defined]
    raise Refusal(
        f"the tokenizer is of the kind {tokenizer.kind}, which takes the control tokens of a chat template for text; "
        "set model.hf_assets_path to a folder with the same model's tokenizer.json"
    )
