"""Hugging Face, Llama 3 tiktoken and Llama 2 SentencePiece tokenizer files behind one small interface.

The kind of a file is read from its content, never from its name. Text can hold no control token: `<|end_of_text|>`
inside a document is encoded as the characters it is made of. A file that is no tokenizer is refused, with a guess at
what it is.
"""

from __future__ import annotations

import base64
import json
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from torchtitan.refusal import Refusal

FOLDER_CANDIDATES = ("tokenizer.json", "tokenizer.model", "original/tokenizer.model")
EXPECTED = "a Hugging Face tokenizer.json, or Llama 3's (tiktoken) or Llama 2's (SentencePiece) tokenizer.model"
KNOWN_BOS = ("<|begin_of_text|>", "<s>")
KNOWN_EOS = ("<|end_of_text|>", "</s>", "<|endoftext|>")

# A tiktoken file holds neither its pattern nor its special tokens; these are Llama 3.1's.
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3_SPECIAL_TOKENS = (
    "<|begin_of_text|> <|end_of_text|> <|reserved_special_token_0|> <|reserved_special_token_1|> "
    "<|finetune_right_pad_id|> <|reserved_special_token_2|> <|start_header_id|> <|end_header_id|> "
    "<|eom_id|> <|eot_id|> <|python_tag|>"
).split() + [f"<|reserved_special_token_{i}|>" for i in range(3, 248)]
# tiktoken panics on longer texts and is quadratic in the length of a run without (or of nothing but) white space.
# Llama 3's own code cuts at the same places, so the ids agree with it.
TIKTOKEN_MAX_CHARS = 400_000
TIKTOKEN_MAX_RUN = 25_000


class Tokenizer(ABC):
    """Safe to use from several threads: nothing changes after construction."""

    kind: str
    vocab_size: int  # ids an embedding needs: the largest id + 1
    bos_id: int | None
    eos_id: int

    @abstractmethod
    def _encode(self, text: str) -> list[int]: ...

    @abstractmethod
    def _encode_batch(self, texts: list[str]) -> list[list[int]]: ...

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """The text, without control tokens: what `encode` was given, whatever `bos` and `eos` were."""

    def encode(self, text: str, bos: bool, eos: bool) -> list[int]:
        """`bos` adds nothing where the tokenizer has no BOS (`bos_id` is None)."""
        return self._frame(self._encode(_encodable(text)), bos, eos)

    def encode_batch(self, texts: list[str], bos: bool, eos: bool) -> list[list[int]]:
        """The same as `encode` of each, on several cores."""
        return [self._frame(ids, bos, eos) for ids in self._encode_batch([_encodable(text) for text in texts])]

    def _frame(self, ids: list[int], bos: bool, eos: bool) -> list[int]:
        if bos and self.bos_id is not None:
            ids.insert(0, self.bos_id)
        if eos:
            ids.append(self.eos_id)
        return ids


class HuggingFaceTokenizer(Tokenizer):
    kind = "huggingface"

    def __init__(self, path: Path, content: dict[str, Any]) -> None:
        import tokenizers

        added = [token["content"] for token in content.get("added_tokens") or []]
        config_path = path.parent / "tokenizer_config.json"
        config = _load_json(config_path) if config_path.is_file() else {}
        bos = _named_token(config, "bos_token", KNOWN_BOS, added)
        eos = _named_token(config, "eos_token", KNOWN_EOS, added)
        if eos is None:
            found = f"names no eos_token and none of {', '.join(KNOWN_EOS)} is among the added tokens"
            if "eos_token" in config:
                found = "names null as eos_token"
            raise Refusal(
                f'{path}: no end-of-text token: {config_path} {found}; write {{"eos_token": "..."}} to {config_path}'
            )
        for token in content.get("added_tokens") or []:
            token["special"] = token.get("special", False) or token["content"] in (bos, eos)
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(json.dumps(content))
        except Exception as error:  # the library raises bare Exception
            message = f"{path}: tokenizers {tokenizers.__version__} cannot read it ({error}); expected {EXPECTED}"
            raise Refusal(message) from error
        # A file may say "at most 512 tokens" or "pad to the longest", which would lose or invent training text.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True  # that is, as text
        vocab = self._tokenizer.get_vocab(with_added_tokens=True)
        for token in filter(None, (bos, eos)):
            if token not in vocab:
                raise Refusal(f"{config_path} names {token!r}, which is not in {path}; correct one of the two")
            if vocab[token] in self._encode(token):
                raise Refusal(
                    f"{path}: the text {token!r} is encoded as the control token, so a document could end itself; "
                    "use a byte-level BPE tokenizer"
                )
        self.vocab_size = max(vocab.values()) + 1
        self.bos_id = vocab[bos] if bos is not None else None
        self.eos_id = vocab[eos]

    # add_special_tokens=False: the file's post-processor would add a second BOS.
    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def _encode_batch(self, texts: list[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)]

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)


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
                raise Refusal(f"{path}, line {number}: {line[:60]!r} is not a base64 token and its rank") from error
        if sorted(ranks.values()) != list(range(len(ranks))) or any(bytes([b]) not in ranks for b in range(256)):
            raise Refusal(
                f"{path}: {len(ranks)} ranks, which should be 0, 1, 2 ... without a gap and include every single byte; "
                "the file is damaged, get it again"
            )
        self._num_text_ids = len(ranks)
        special = {token: len(ranks) + i for i, token in enumerate(LLAMA3_SPECIAL_TOKENS)}
        self._encoding = tiktoken.Encoding(
            path.name, pat_str=LLAMA3_PATTERN, mergeable_ranks=ranks, special_tokens=special
        )
        self.vocab_size = self._encoding.n_vocab
        self.bos_id = special["<|begin_of_text|>"]
        self.eos_id = special["<|end_of_text|>"]

    def _encode(self, text: str) -> list[int]:
        # encode_ordinary knows no special token, wherever the text holds one.
        return [token for piece in _tiktoken_pieces(text) for token in self._encoding.encode_ordinary(piece)]

    def _encode_batch(self, texts: list[str]) -> list[list[int]]:
        with ThreadPoolExecutor(min(os.cpu_count() or 1, 16)) as pool:
            return list(pool.map(self._encode, texts))

    def decode(self, ids: Sequence[int]) -> str:
        return self._encoding.decode([token for token in ids if token < self._num_text_ids])


class SentencePieceTokenizer(Tokenizer):
    kind = "sentencepiece"

    def __init__(self, path: Path, data: bytes) -> None:
        import sentencepiece

        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=data)
        except RuntimeError as error:
            raise Refusal(f"{path}: a damaged SentencePiece model ({error}); get the file again") from error
        bos_id, eos_id = self._processor.bos_id(), self._processor.eos_id()
        if eos_id < 0:
            raise Refusal(f"{path}: the SentencePiece model has no EOS piece; train it with one (--eos_id)")
        self.vocab_size = self._processor.get_piece_size()
        self.bos_id = bos_id if bos_id >= 0 else None
        self.eos_id = eos_id

    def _encode(self, text: str) -> list[int]:
        return self._processor.encode(text, out_type=int)

    def _encode_batch(self, texts: list[str]) -> list[list[int]]:
        return self._processor.encode(texts, out_type=int, num_threads=os.cpu_count() or 1)

    def decode(self, ids: Sequence[int]) -> str:
        return self._processor.decode([token for token in ids if token < self.vocab_size])


def build_tokenizer(path: str | Path) -> Tokenizer:
    """From a tokenizer file, or a folder (such as a Hugging Face model's) that holds one."""
    file = _find_file(Path(path))
    data = file.read_bytes()
    if data.lstrip()[:1] == b"{":
        content = _load_json(file)
        if "model" in content:
            return HuggingFaceTokenizer(file, content)
    elif re.match(rb"[A-Za-z0-9+/]+=* \d+\r?\n", data):
        return TiktokenTokenizer(file, data)
    elif re.match(rb"\x0a[\x80-\xff]*[\x00-\x7f]\x0a", data):  # field 1 (a piece) whose field 1 is a string
        return SentencePieceTokenizer(file, data)
    raise Refusal(f"{file} is no tokenizer: it looks like {_describe(data)}. Expected {EXPECTED}")


def _find_file(path: Path) -> Path:
    looked = [path / name for name in FOLDER_CANDIDATES] if path.is_dir() else [path]
    for candidate in looked:
        if candidate.is_file():
            return candidate
    raise Refusal(
        f"no tokenizer at {path}; looked for {', '.join(map(str, looked))}. Fetch one by `python -m torchtitan "
        f"download tokenizer OWNER/NAME --to {path}`, put its files there ({EXPECTED}), or set model.hf_assets_path "
        "to where they are"
    )


def _load_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_bytes())
    except ValueError as error:
        raise Refusal(f"{path} is not valid JSON ({error}); the file is damaged, get it again") from error


def _named_token(config: dict[str, Any], key: str, known: Sequence[str], added: Sequence[str]) -> str | None:
    if key in config:
        token = config[key]
        return token["content"] if isinstance(token, dict) else token
    return next((token for token in known if token in added), None)


def _describe(data: bytes) -> str:
    head = data[:400].lstrip()
    if not head:
        return "an empty file"
    if head.startswith(b"version https://git-lfs"):
        return "a Git LFS pointer, not the file it points to; run `git lfs pull` where it was cloned"
    if re.match(rb"(<!--.*?-->\s*)?<(!doctype|html|\?xml)", head, re.IGNORECASE | re.DOTALL):
        return "an HTML page, often a log-in or error page saved in its place; accept the model's licence and log in"
    if head.startswith(b"{"):
        return f"JSON without a 'model' key (its keys: {', '.join(list(json.loads(data))[:8]) or 'none'})"
    if data[8:9] == b"{" and int.from_bytes(data[:8], "little") < 1 << 32:
        return "a safetensors file (weights)"
    if head.startswith(b"PK\x03\x04"):
        return "a zip archive, such as a PyTorch checkpoint"
    if re.fullmatch(rb"[\t\n\r\x20-\x7e]+", head):
        return f"text that begins with {head[:60].decode()!r}"
    return f"a binary file that begins with {head[:8].hex(' ')}"


def _encodable(text: str) -> str:
    """Half a surrogate pair (JSON can hold one) has no bytes to encode; it becomes U+FFFD."""
    try:
        text.encode()
        return text
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


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
