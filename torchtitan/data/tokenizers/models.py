"""The two kinds of tokenizer.model: Llama 3's (tiktoken) and Llama 2's (SentencePiece)."""

import base64
import os
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from torchtitan.data.tokenizers.files import load_config
from torchtitan.data.tokenizers.interface import Tokenizer, encodable, pieces
from torchtitan.refusal import Refusal

# A tiktoken file contains neither its split pattern nor its control tokens. These are Llama 3.1's.
TIKTOKEN_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TIKTOKEN_SPECIAL_TOKENS = (
    "<|begin_of_text|> <|end_of_text|> <|reserved_special_token_0|> <|reserved_special_token_1|> "
    "<|finetune_right_pad_id|> <|reserved_special_token_2|> <|start_header_id|> <|end_header_id|> "
    "<|eom_id|> <|eot_id|> <|python_tag|>"
).split() + [f"<|reserved_special_token_{i}|>" for i in range(3, 248)]
# tiktoken panics on a longer text, and its time grows with the square of a run of white space or of other characters.
# Llama 3's own code cuts texts at the same places, so the ids are the same.
TIKTOKEN_MAX_CHARS = 400_000
TIKTOKEN_MAX_RUN = 25_000


class TiktokenTokenizer(Tokenizer):
    kind = "tiktoken"

    def __init__(self, path: Path, data: bytes) -> None:
        import tiktoken

        ranks: dict[bytes, int] = {}
        for number, line in enumerate(data.splitlines(), start=1):
            try:
                token, rank = line.split()
                ranks[base64.b64decode(token, validate=True)] = int(rank)
            except ValueError as error:
                raise Refusal(
                    f"{path}, line {number}: {line[:60]!r} is not a base64 token and its rank; download the file again"
                ) from error
        if sorted(ranks.values()) != list(range(len(ranks))) or any(bytes([b]) not in ranks for b in range(256)):
            raise Refusal(
                f"{path} has {len(ranks)} ranks, which should be 0, 1, 2 ... without a gap and include every single "
                "byte; the file is damaged: download it again"
            )
        self._num_text_ids = len(ranks)
        special = {token: len(ranks) + i for i, token in enumerate(TIKTOKEN_SPECIAL_TOKENS)}
        self._encoding = tiktoken.Encoding(
            path.name, pat_str=TIKTOKEN_PATTERN, mergeable_ranks=ranks, special_tokens=special
        )
        self.vocab_size = self._encoding.n_vocab
        self.bos_token, self.bos_id = "<|begin_of_text|>", special["<|begin_of_text|>"]
        self.eos_token, self.eos_id = "<|end_of_text|>", special["<|end_of_text|>"]
        _, self._config = load_config(path.parent)

    def _encode(self, text: str) -> list[int]:
        # encode_ordinary encodes a control token in the text as ordinary characters.
        return [token for piece in _tiktoken_pieces(text) for token in self._encoding.encode_ordinary(piece)]

    def _encode_batch(self, texts: list[str]) -> list[list[int]]:
        with ThreadPoolExecutor(min(os.cpu_count() or 1, 16)) as pool:
            return list(pool.map(self._encode, texts))

    def decode(self, ids: Sequence[int]) -> str:
        return self._encoding.decode([token for token in ids if token < self._num_text_ids])

    def encode_prompt(self, text: str, as_trained: bool = False) -> list[int]:
        ids = self._encoding.encode(encodable(text), allowed_special="all")
        return self._frame(ids, *_frame_of_prompts(self._config, as_trained))


class SentencePieceTokenizer(Tokenizer):
    kind = "sentencepiece"

    def __init__(self, path: Path, data: bytes) -> None:
        import sentencepiece

        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=data)
        except RuntimeError as error:
            raise Refusal(f"{path} is a damaged SentencePiece model ({error}); download it again") from error
        bos_id, eos_id = self._processor.bos_id(), self._processor.eos_id()
        if eos_id < 0:
            raise Refusal(f"{path} is a SentencePiece model without an EOS piece; train it with one (--eos_id)")
        self.vocab_size = self._processor.get_piece_size()
        self.bos_token, self.bos_id = (self._processor.id_to_piece(bos_id), bos_id) if bos_id >= 0 else (None, None)
        self.eos_token, self.eos_id = self._processor.id_to_piece(eos_id), eos_id
        _, self._config = load_config(path.parent)

    def _encode(self, text: str) -> list[int]:
        return [i for piece in pieces(text) for i in self._processor.encode(piece, out_type=int)]

    def _encode_batch(self, texts: list[str]) -> list[list[int]]:
        return self._processor.encode(texts, out_type=int, num_threads=os.cpu_count() or 1)

    def decode(self, ids: Sequence[int]) -> str:
        return self._processor.decode([token for token in ids if token < self.vocab_size])

    # SentencePiece has no way to recognise <s> in a text, so here, unlike in transformers, it stays ordinary text.
    def encode_prompt(self, text: str, as_trained: bool = False) -> list[int]:
        return self._frame(self._encode(encodable(text)), *_frame_of_prompts(self._config, as_trained))


def _frame_of_prompts(config: dict[str, Any], as_trained: bool) -> tuple[bool, bool]:
    """Whether BOS and EOS belong around a prompt. Llama's own code puts BOS first, unless the folder says otherwise."""
    if as_trained:
        return True, False
    return config.get("add_bos_token", True), config.get("add_eos_token", False)


def _tiktoken_pieces(text: str) -> Iterator[str]:
    for start in range(0, len(text), TIKTOKEN_MAX_CHARS):
        part = text[start : start + TIKTOKEN_MAX_CHARS]
        begin = 0
        if len(part) > TIKTOKEN_MAX_RUN:
            for run in re.finditer(r"\s+|\S+", part):
                for end in range(run.start() + TIKTOKEN_MAX_RUN, run.end(), TIKTOKEN_MAX_RUN):
                    yield part[begin:end]
                    begin = end
        yield part[begin:]
