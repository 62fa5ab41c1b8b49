"""Shared by the tokenizer tests: small files of every kind, made from the shipped tokenizer and corpus."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
ASSETS = ROOT / "tests" / "assets"
SHIPPED = ASSETS / "tokenizer"
KINDS = ("huggingface", "tiktoken", "sentencepiece")
UNUSUAL_TEXTS = (
    "",
    " ",
    "plain words",
    "  two spaces first,\ttab, and trailing spaces   ",
    "line\r\nline\n\n\n\rline\n",
    "control \x01\x02\x1b[0m\x7f characters",
    "emoji 👩‍👩‍👧‍👦 🏳️‍🌈 and flags 🇨🇭",
    "naïve café; cafe\u0301 (combining); Ελληνικά; 日本語; العربية",
    "zero\u200bwidth, no\u00a0break, byte order \ufeff mark",
    "def f(x):\n        return x['s'] ** 2  # don't\n",
)


def read_documents(name: str) -> list[str]:
    with open(ASSETS / "pydocs" / name, encoding="utf-8") as lines:
        return [json.loads(line)["text"] for line in lines]


def shipped_json() -> dict:
    return json.loads((SHIPPED / "tokenizer.json").read_text(encoding="utf-8"))


def byte_level_tokens() -> list[bytes]:
    """The shipped vocabulary without its control tokens, in order, as bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    byte_of = {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}
    vocab = shipped_json()["model"]["vocab"]
    return [bytes(byte_of[c] for c in token) for token in sorted(vocab, key=vocab.__getitem__)[2:]]


@pytest.fixture(scope="module")
def tiktoken_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiktoken") / "tokenizer.model"
    lines = [base64.b64encode(token) + f" {rank}\n".encode() for rank, token in enumerate(byte_level_tokens())]
    path.write_bytes(b"".join(lines))
    return path


def train_sentencepiece(path: Path, **options: Any) -> Path:
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(line for text in read_documents("validation.jsonl") for line in text.splitlines()),
        model_writer=model,
        model_type="bpe",
        vocab_size=512,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
        **options,
    )
    path.write_bytes(model.getvalue())
    return path


@pytest.fixture(scope="module")
def sentencepiece_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_sentencepiece(tmp_path_factory.mktemp("sentencepiece") / "tokenizer.model")


def write_huggingface(folder: Path, config: dict | None = None, **changes: object) -> Path:
    """The shipped tokenizer.json with top-level keys replaced, and its tokenizer_config.json if one is given."""
    (folder / "tokenizer.json").write_text(json.dumps(shipped_json() | changes))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
