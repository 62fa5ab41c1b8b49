"""Finds a tokenizer's files and reads them as JSON. If a file is not a tokenizer, says what it probably is instead."""

import json
import re
from pathlib import Path
from typing import Any

from torchtitan.refusal import Refusal

FOLDER_CANDIDATES = ("tokenizer.json", "tokenizer.model", "original/tokenizer.model")
EXPECTED = "a Hugging Face tokenizer.json, or a tiktoken or SentencePiece tokenizer.model"


def find_file(path: Path) -> Path:
    looked = [path / name for name in FOLDER_CANDIDATES] if path.is_dir() else [path]
    for candidate in looked:
        if candidate.is_file():
            return candidate
    raise Refusal(
        f"no tokenizer at {path}; looked for {', '.join(map(str, looked))}. Download one with `python -m torchtitan "
        f"download tokenizer OWNER/NAME --to {path}`, put {EXPECTED} there, or set model.hf_assets_path to the folder "
        "that has one"
    )


def load_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise Refusal(f"{path} is not valid JSON ({error}); the file is damaged: download it again") from error
    if not isinstance(content, dict):
        raise Refusal(f"{path} holds no JSON object; the file is damaged: download it again")
    return content


def load_config(folder: Path) -> tuple[Path, dict[str, Any]]:
    """The path of tokenizer_config.json and its content, which is empty if there is no such file."""
    path = folder / "tokenizer_config.json"
    return path, load_json(path) if path.is_file() else {}


def describe(data: bytes) -> str:
    """A guess at what a file is that is not a tokenizer."""
    head = data[:400].lstrip()
    if not head:
        return "an empty file"
    if head.startswith(b"version https://git-lfs"):
        return "a Git LFS pointer instead of the file itself; run `git lfs pull` in the clone it came from"
    if re.match(rb"(<!--.*?-->\s*)?<(!doctype|html|\?xml)", head, re.IGNORECASE | re.DOTALL):
        return "an HTML page, often a login or error page saved in its place; accept the model's licence and log in"
    if head.startswith(b"{"):
        return f"JSON without a 'model' key (its keys: {', '.join(list(json.loads(data))[:8]) or 'none'})"
    if data[8:9] == b"{" and int.from_bytes(data[:8], "little") < 1 << 32:
        return "a safetensors file (weights)"
    if head.startswith(b"PK\x03\x04"):
        return "a zip archive, such as a PyTorch checkpoint"
    if re.fullmatch(rb"[\t\n\r\x20-\x7e]+", head):
        return f"text that begins with {head[:60].decode()!r}"
    return f"a binary file that begins with {head[:8].hex(' ')}"
