"""Opens what turns the conversations of a source into tokens: the template, the tokenizer and what is learned."""

import hashlib
from pathlib import Path
from typing import Any

from torchtitan.config.schema import Config, DataSource, Model
from torchtitan.data.chat.encoder import ChatEncoder
from torchtitan.data.chat.packing import ChatPacker
from torchtitan.data.chat.pairs import Pair, PairEncoder, PairPacker
from torchtitan.data.chat.rows import Conversation
from torchtitan.data.chat.spans import SpanFinder
from torchtitan.data.chat.spelling import Speller, build_speller
from torchtitan.data.chat.template import ChatTemplate, Found, find_template, named_tokens
from torchtitan.data.texts.sources import locate_text
from torchtitan.data.tokenizers.files import find_file, load_json
from torchtitan.data.tokenizers.tokenizer import Tokenizer
from torchtitan.refusal import Refusal


def open_chats(
    given: list[DataSource], config: Config, seq_len: int, tokenizer: Tokenizer
) -> tuple[list[DataSource], type[ChatPacker]]:
    """The sources, and what packs their documents."""
    is_of_pairs = config.training.preference_beta is not None
    sources = with_encoders(given, config.model, seq_len, tokenizer, is_of_pairs)
    return sources, PairPacker if is_of_pairs else ChatPacker


def with_encoders(
    given: list[DataSource], model: Model, seq_len: int, tokenizer: Tokenizer, of_pairs: bool = False
) -> list[DataSource]:
    """The sources, of which those of conversations get an encoder in the place of a text_key."""
    sources = []
    for source in given:
        if source.chat is not None:
            conversation = _conversation(source, source.chat, model, seq_len, tokenizer, of_pairs)
            source = source.model_copy(update={"text_key": conversation})
        sources.append(source)
    return sources


def _conversation(
    source: DataSource, learn: str, model: Model, seq_len: int, tokenizer: Tokenizer, of_pairs: bool
) -> Conversation:
    name = source.dataset_path or source.dataset
    stored = locate_text(source.dataset, source.dataset_path).kind
    if stored in ("prepared", "text"):
        what = "prepared tokens do not say which are learned" if stored == "prepared" else "a text file has no rows"
        raise Refusal(f"{name}: chat = {learn!r} needs conversations, but {what}; give JSONL, Parquet or a dataset")
    found, template = open_template(model, tokenizer)
    digest = hashlib.sha256(f"{found.text}".encode()).hexdigest()[:8]
    conversation: Conversation = Pair("chosen") if of_pairs else Conversation("messages")
    kind, most = (PairEncoder, (seq_len - 2) // 2) if of_pairs else (ChatEncoder, seq_len)
    conversation.encoder = kind(name, tokenizer, *open_finder(model, tokenizer, template, learn), most)
    conversation.identity = f"; {'pairs' if of_pairs else 'conversations'} (learned: {learn}; template {digest})"
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
