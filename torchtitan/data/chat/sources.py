"""Opens what turns the conversations of a source into tokens: the template, the tokenizer and what is learned."""

import hashlib
from pathlib import Path
from typing import Any

from torchtitan.config.schema import DataSource, Model
from torchtitan.data.chat.encoder import ChatEncoder
from torchtitan.data.chat.rows import Conversation
from torchtitan.data.chat.spans import SpanFinder
from torchtitan.data.chat.spelling import Speller, build_speller
from torchtitan.data.chat.template import ChatTemplate, Found, find_template, named_tokens
from torchtitan.data.texts.sources import locate_text
from torchtitan.data.tokenizers.files import find_file, load_json
from torchtitan.data.tokenizers.tokenizer import Tokenizer
from torchtitan.refusal import Refusal


def with_encoders(given: list[DataSource], model: Model, seq_len: int, tokenizer: Tokenizer) -> list[DataSource]:
    """The sources, of which those of conversations get an encoder in the place of a text_key."""
    sources = []
    for source in given:
        if source.chat is not None:
            conversation = _conversation(source, source.chat, model, seq_len, tokenizer)
            source = source.model_copy(update={"text_key": conversation})
        sources.append(source)
    return sources


def _conversation(source: DataSource, learn: str, model: Model, seq_len: int, tokenizer: Tokenizer) -> Conversation:
    name = source.dataset_path or source.dataset
    kind = locate_text(source.dataset, source.dataset_path).kind
    if kind in ("prepared", "text"):
        what = "prepared tokens do not say which are learned" if kind == "prepared" else "a text file has no rows"
        raise Refusal(f"{name}: chat = {learn!r} needs conversations, but {what}; give JSONL, Parquet or a dataset")
    found, template = open_template(model, tokenizer)
    digest = hashlib.sha256(f"{found.text}".encode()).hexdigest()[:8]
    conversation = Conversation("messages")
    conversation.encoder = ChatEncoder(name, tokenizer, *open_finder(model, tokenizer, template, learn), seq_len)
    conversation.identity = f"; conversations (learned: {learn}; template {digest})"
    return conversation


def open_finder(
    model: Model, tokenizer: Tokenizer, template: ChatTemplate, learn: str = "all"
) -> tuple[Speller, SpanFinder]:
    speller = build_speller(tokenizer)
    ends = {tokenizer.eos_token, template.names["eos_token"]} | _ends(_folder(model), speller)
    return speller, SpanFinder(template, learn, list(speller.control), sorted(ends))


def open_template(model: Model, tokenizer: Tokenizer) -> tuple[Found, ChatTemplate]:
    folder = _folder(model)
    found = find_template(model.chat_template, folder)
    return found, ChatTemplate(found, named_tokens(folder, tokenizer.bos_token, tokenizer.eos_token))


def _folder(model: Model) -> Path:
    assets = Path(model.hf_assets_path)
    return assets if assets.is_dir() else find_file(assets).parent


def _ends(folder: Path, speller: Speller) -> set[str]:
    """The control tokens that generation_config.json stops at."""
    path = folder / "generation_config.json"
    named: Any = load_json(path).get("eos_token_id") if path.is_file() else None
    ids = named if isinstance(named, list) else [named]
    return {token for token, number in speller.control.items() if number in ids}
