"""Prompts of a conversation with a model: the tokens that an answer is to follow, and those that end it."""

from collections.abc import Sequence
from typing import Any

from torchtitan.config.schema import Model
from torchtitan.data.chat.sources import open_finder, open_template
from torchtitan.data.tokenizers.interface import encodable
from torchtitan.data.tokenizers.tokenizer import Tokenizer


class ChatPrompts:
    """Makes a prompt of messages, as transformers' apply_chat_template does with add_generation_prompt."""

    def __init__(self, model: Model, tokenizer: Tokenizer) -> None:
        _, self._template = open_template(model, tokenizer)
        self._speller, finder = open_finder(model, tokenizer, self._template)
        said = finder.find(
            _conversation([{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}])
        )
        ids = self._speller.spell(said.text[slice(*said.spans[0])]).ids
        self.stop = ids[-1]  # the end mark, or the last token of one

    def ids(self, messages: Sequence[dict[str, str]]) -> list[int]:
        return self._speller.spell(encodable(self.text(messages))).ids

    def text(self, messages: Sequence[dict[str, str]], opens_answer: bool = True) -> str:
        """The text that an answer is to follow, or without `opens_answer` the end of the last message."""
        text = self._template.render(messages, _conversation(messages), prompt=opens_answer)
        if opens_answer:
            return text
        last = messages[-1]["content"].strip()
        return text[: text.rindex(last) + len(last)]


def _conversation(messages: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {"where": "the conversation", "messages": messages, "first": 0, "tools": None, "values": {}}
