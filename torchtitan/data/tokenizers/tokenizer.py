"""One interface to three kinds of tokenizer: Hugging Face's, Llama 3's (tiktoken) and Llama 2's (SentencePiece).

A document never contains a control token: the text `<|end_of_text|>` in it is encoded as ordinary characters.
A prompt is encoded as transformers encodes it with the same folder.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchtitan.data.tokenizers.files import EXPECTED, find_file, load_config, load_json
from torchtitan.data.tokenizers.interface import Tokenizer, encodable, pieces
from torchtitan.refusal import Refusal

__all__ = ["Tokenizer", "build_tokenizer"]

KNOWN_BOS = ("<|begin_of_text|>", "<s>")
KNOWN_EOS = ("<|end_of_text|>", "</s>", "<|endoftext|>")


class HuggingFaceTokenizer(Tokenizer):
    kind = "huggingface"

    def __init__(self, path: Path, content: dict[str, Any]) -> None:
        import tokenizers

        added = [token["content"] for token in content.get("added_tokens") or []]
        config_path, config = load_config(path.parent)
        bos = _named_token(config, "bos_token", KNOWN_BOS, added)
        eos = _named_token(config, "eos_token", KNOWN_EOS, added)
        if eos is None:
            found = f"names no eos_token and none of {', '.join(KNOWN_EOS)} is among the added tokens"
            if "eos_token" in config:
                found = "names null as eos_token"
            raise Refusal(
                f'{path} has no end-of-text token: {config_path} {found}; write {{"eos_token": "..."}} to {config_path}'
            )
        for token in content.get("added_tokens") or []:
            token["special"] = token.get("special", False) or token["content"] in (bos, eos)
        prefix, merges = content["model"].get("continuing_subword_prefix"), content["model"].get("merges")
        parts = [m.split(" ") if isinstance(m, str) else m for m in merges or []] if prefix else []
        if not all(second.startswith(prefix) for _, second in parts):  # the package would end the process
            raise Refusal(
                f"{path}: a merge lacks the continuing_subword_prefix {str(prefix)[:40]!r}; download it again"
            )
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(json.dumps(content))
        except Exception as error:  # tokenizers raises bare Exception
            message = f"{path}: tokenizers {tokenizers.__version__} cannot read it ({error}); give {EXPECTED}"
            raise Refusal(message) from error
        # The file may ask for at most 512 tokens, or for padding. Training would lose text or learn from padding.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True  # that is, as ordinary text
        vocab = self._tokenizer.get_vocab(with_added_tokens=True)
        for token in filter(None, (bos, eos)):
            if token not in vocab:
                raise Refusal(
                    f"{config_path} names {token!r}, which is not in {path}; download both files from one repository"
                )
            if vocab[token] in self._encode(token):
                raise Refusal(
                    f"{path} encodes the text {token!r} as the control token, so a document could end itself; use a "
                    "byte-level BPE tokenizer"
                )
        self.vocab_size = max(vocab.values()) + 1
        self.bos_token, self.bos_id = bos, vocab[bos] if bos is not None else None
        self.eos_token, self.eos_id = eos, vocab[eos]
        self._prompts_are_plain = bool(config.get("split_special_tokens"))

    # add_special_tokens=False: the file's post-processor would add a second BOS.
    def _encode(self, text: str) -> list[int]:
        return [i for piece in pieces(text) for i in self._tokenizer.encode(piece, add_special_tokens=False).ids]

    def _encode_batch(self, texts: list[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)]

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    # transformers 5 ignores add_bos_token in tokenizer_config.json if there is a tokenizer.json: the post-processor
    # in tokenizer.json alone decides. Control tokens that are written in the text become control tokens.
    def encode_prompt(self, text: str, as_trained: bool = False) -> list[int]:
        ids = self.prompt_tokenizer.encode(encodable(text), add_special_tokens=not as_trained).ids
        return self._frame(ids, bos=as_trained, eos=False)

    @functools.cached_property
    def prompt_tokenizer(self) -> Any:
        import tokenizers

        tokenizer = tokenizers.Tokenizer.from_str(self._tokenizer.to_str())
        known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
        named = [token for token in (self.bos_token, self.eos_token) if token and token not in known]
        tokenizer.add_special_tokens([tokenizers.AddedToken(t, special=True, normalized=False) for t in named])
        tokenizer.encode_special_tokens = self._prompts_are_plain
        return tokenizer


def build_tokenizer(path: str | Path) -> Tokenizer:
    """Open a tokenizer file, or a folder that holds one, such as a downloaded Hugging Face model."""
    file = find_file(Path(path))
    data = file.read_bytes()
    try:
        tokenizer = _open(file, data)
        tokenizer.decode(tokenizer.encode("A b", bos=True, eos=True))  # some damage shows only now
    except (Refusal, KeyboardInterrupt, SystemExit, ImportError):
        raise
    except BaseException as error:  # a panic of the Rust code is no Exception
        said = str(error).strip().partition("\n")[0][:200]
        raise Refusal(
            f"{file}, or a JSON file beside it, is damaged ({type(error).__name__}: {said}); download it again"
        ) from None
    tokenizer.file_sha256 = hashlib.sha256(data).hexdigest()
    return tokenizer


def _open(file: Path, data: bytes) -> Tokenizer:
    """The content of the file decides its kind; its name does not."""
    if data.lstrip()[:1] == b"{":
        content = load_json(file)
        if "model" in content:
            return HuggingFaceTokenizer(file, content)
    elif re.match(rb"[A-Za-z0-9+/]+=* \d+\r?\n", data):
        from torchtitan.data.tokenizers.models import TiktokenTokenizer

        return TiktokenTokenizer(file, data)
    elif re.match(rb"\x0a[\x80-\xff]*[\x00-\x7f]\x0a", data):  # field 1 (a piece) whose field 1 is a string
        from torchtitan.data.tokenizers.models import SentencePieceTokenizer

        return SentencePieceTokenizer(file, data)
    from torchtitan.data.tokenizers.other_files import describe

    raise Refusal(f"{file} is not a tokenizer: it looks like {describe(data)}. Give {EXPECTED}")


def _named_token(config: dict[str, Any], key: str, known: Sequence[str], added: Sequence[str]) -> str | None:
    if key in config:
        token = config[key]
        return token["content"] if isinstance(token, dict) else token
    return next((token for token in known if token in added), None)
