"""Finds where each message stands in the text of a conversation, by marks that only a template can have moved.

A mark is a character of no use elsewhere, one for each message, put behind the last visible character of each of its
texts (or before the first). The template renders the marked conversation. Only if the result without marks is the
conversation's own text, character by character, do the marks say where the messages stand.
"""

import copy
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torchtitan.data.chat.template import ChatTemplate
from torchtitan.refusal import Refusal

_PLANES = (0xF0000, 0x100000)  # for private use
_SIZE = 0xFFF0


@dataclass(frozen=True)
class Marked:
    """A text without its marks, and where they were: for each message the places in the text."""

    text: str
    places: dict[int, list[int]]

    @property
    def last(self) -> tuple[int, int]:
        """Message and place of the last mark; before all messages if there is none."""
        return max(((self.places[number][-1], number) for number in self.places), default=(0, -1))[::-1]


class Marks:
    """The marks of one conversation."""

    def __init__(self, template: ChatTemplate, conversation: dict[str, Any], text: str) -> None:
        self.template, self.conversation = template, conversation
        used = text + str(conversation["messages"])
        free = [first for first in _PLANES if not re.search(f"[{chr(first)}-{chr(first + _SIZE)}]", used)]
        if not free or len(conversation["messages"]) > _SIZE:
            raise Refusal(
                f"{conversation['where']}: the conversation uses characters for private use of both planes, which "
                "mark messages here; leave the row out"
            )
        self.first = free[0]
        self.behind = [self._marked(message, number, True) for number, message in enumerate(conversation["messages"])]

    def render(self, count: int, prompt: bool = False) -> Marked:
        """The first messages, each marked behind its texts."""
        return self._read(self.template.render(self.behind[:count], self.conversation, prompt))

    def render_before(self, number: int) -> Marked:
        """The whole conversation, with one message marked before its texts."""
        messages = list(self.conversation["messages"])
        messages[number] = self._marked(messages[number], number, False)
        return self._read(self.template.render(messages, self.conversation))

    def _read(self, text: str) -> Marked:
        plain, places, end = [], dict[int, list[int]](), 0
        for piece in re.split(f"([{chr(self.first)}-{chr(self.first + _SIZE)}])", text):
            if len(piece) == 1 and self.first <= ord(piece) <= self.first + _SIZE:
                places.setdefault(ord(piece) - self.first, []).append(end)
            else:
                plain.append(piece)
                end += len(piece)
        return Marked("".join(plain), places)

    def _marked(self, message: dict[str, Any], number: int, behind: bool) -> dict[str, Any]:
        mark, marked = chr(self.first + number), copy.deepcopy(message)

        def put(text: str) -> str:
            if not text.strip():  # a template may ask whether there is a text
                return text
            cut = len(text.rstrip()) if behind else len(text) - len(text.lstrip())
            return text[:cut] + mark + text[cut:]

        for key in ("content", "reasoning_content", "thinking", "reasoning"):
            if isinstance(marked.get(key), str):
                marked[key] = put(marked[key])
        for part in marked["content"] if isinstance(marked.get("content"), list) else []:
            part["text"] = put(part["text"])
        for call in marked.get("tool_calls") or []:
            called = call.get("function", call)
            arguments = _each_text(called.get("arguments"), put)
            if arguments != called.get("arguments"):
                called["arguments"] = arguments
            elif isinstance(called.get("name"), str):  # no text among its arguments
                called["name"] = put(called["name"])
        return marked


def _each_text(value: Any, put: Any) -> Any:
    if isinstance(value, str):
        return put(value)
    if isinstance(value, dict):
        return {key: _each_text(each, put) for key, each in value.items()}
    return [_each_text(each, put) for each in value] if isinstance(value, list) else value


def has_text(message: dict[str, Any]) -> bool:
    """Whether a template has something of the message to show."""
    content = message.get("content")
    parts: Sequence[Any] = content if isinstance(content, list) else [{"text": content or ""}]
    return any(part["text"].strip() for part in parts) or bool(message.get("tool_calls"))
