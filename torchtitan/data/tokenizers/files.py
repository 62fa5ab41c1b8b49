"""Finds a tokenizer's files, and reads and writes JSON."""

import json
from pathlib import Path
from typing import Any

from torchtitan.refusal import Refusal

FOLDER_CANDIDATES = ("tokenizer.json", "tokenizer.model", "original/tokenizer.model")
_DOWNLOADS = Path("assets/hf")  # where the verb `download` writes
# All that a downloaded model has for its tokenizer.
PATTERNS = ("tokenizer*", "original/tokenizer.model", "special_tokens_map.json", "added_tokens.json", "chat_template*",
            "generation_config.json")  # fmt: skip
EXPECTED = "a Hugging Face tokenizer.json, or a tiktoken or SentencePiece tokenizer.model"


def find_file(path: Path) -> Path:
    looked = [path / name for name in FOLDER_CANDIDATES] if path.is_dir() else [path]
    is_name = not path.exists() and len(path.parts) <= 2 and str(path)[:1] not in "./~"  # gpt2, or owner/name
    if is_name:
        looked += [_DOWNLOADS / path.name / name for name in FOLDER_CANDIDATES]
    for candidate in looked:
        if candidate.is_file():
            return candidate
    from torchtitan.models.downloads import name_on_the_hub

    what = path if is_name else f"{name_on_the_hub(path)} --to {path}"
    raise Refusal(
        f"no tokenizer at {path}; looked for {', '.join(map(str, looked))}. Download one with `python -m torchtitan "
        f"download tokenizer {what}`, put {EXPECTED} there, or set "
        "model.hf_assets_path to the folder that has one"
    )


def load_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise Refusal(f"{path} is not valid JSON ({error}); the file is damaged: download it again") from error
    if not isinstance(content, dict):
        raise Refusal(f"{path} holds no JSON object; the file is damaged: download it again")
    return content


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def load_config(folder: Path) -> tuple[Path, dict[str, Any]]:
    """The path of tokenizer_config.json and its content, which is empty if there is no such file."""
    path = folder / "tokenizer_config.json"
    return path, load_json(path) if path.is_file() else {}
