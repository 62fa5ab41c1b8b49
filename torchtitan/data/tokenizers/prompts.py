"""Makes the tokenizer of an exported model do in transformers what training did here: BOS first, and nothing else."""

from pathlib import Path
from typing import Any

from torchtitan.data.tokenizers.files import find_file, load_config, load_json, write_json
from torchtitan.data.tokenizers.models import TIKTOKEN_SPECIAL_TOKENS
from torchtitan.data.tokenizers.tokenizer import HuggingFaceTokenizer, Tokenizer, build_tokenizer


def follow_training(folder: Path) -> None:
    """Edit the tokenizer in `folder` so that transformers begins a prompt as training begins a document.

    A folder that already does is left byte for byte as it is.
    """
    file, tokenizer = find_file(folder), build_tokenizer(folder)
    config_path, config = load_config(folder)
    if _follows_training(tokenizer, config):
        return
    defaults: dict[str, Any] = {"bos_token": tokenizer.bos_token, "eos_token": tokenizer.eos_token}
    if tokenizer.kind == "sentencepiece":
        defaults["tokenizer_class"] = "LlamaTokenizer"
    else:
        # Without a class, transformers takes one by the model's type, which may split text by rules of its own.
        defaults["tokenizer_class"] = "PreTrainedTokenizerFast"
    if tokenizer.kind == "tiktoken":
        first = tokenizer.vocab_size - len(TIKTOKEN_SPECIAL_TOKENS)
        defaults["added_tokens_decoder"] = {
            str(first + i): {"content": token, "special": True} for i, token in enumerate(TIKTOKEN_SPECIAL_TOKENS)
        }
    if isinstance(tokenizer, HuggingFaceTokenizer):
        content = load_json(file)
        content["post_processor"] = _begin_with(tokenizer, content.get("post_processor"))
        write_json(file, content)
    # With tokenizer.json, transformers 5 ignores the two switches and transformers 4 may obey them.
    switches = {"add_bos_token": tokenizer.bos_id is not None, "add_eos_token": False}
    write_json(config_path, defaults | config | switches)


def _follows_training(tokenizer: Tokenizer, config: dict[str, Any]) -> bool:
    if config.get("add_eos_token"):
        return False
    if tokenizer.kind != "huggingface":  # transformers adds no BOS by itself here
        named = all(config.get(key) for key in ("add_bos_token", "bos_token", "tokenizer_class"))
        return tokenizer.bos_id is None or named
    if tokenizer.bos_id is not None and config.get("add_bos_token") is False:
        return False
    return tokenizer.encode_prompt("a") == tokenizer.encode_prompt("a", as_trained=True)


def _begin_with(tokenizer: Tokenizer, old: dict[str, Any] | None) -> dict[str, Any]:
    """A post-processor that puts BOS, if there is one, before a text; ByteLevel, which corrects offsets, stays."""
    bos, text = tokenizer.bos_token, {"Sequence": {"id": "A", "type_id": 0}}
    first = [] if bos is None else [{"SpecialToken": {"id": bos, "type_id": 0}}]
    template = {
        "type": "TemplateProcessing",
        "single": [*first, text],
        "pair": [*first, text, *first, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {} if bos is None else {bos: {"id": bos, "ids": [tokenizer.bos_id], "tokens": [bos]}},
    }
    parts = [] if old is None else old["processors"] if old["type"] == "Sequence" else [old]
    kept = [part for part in parts if part["type"] == "ByteLevel"]
    return {"type": "Sequence", "processors": [*kept, template]} if kept else template
