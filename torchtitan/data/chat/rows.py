"""Makes a conversation of a row: of `messages`, of a prompt with its completion, or of Alpaca's fields.

The conversation travels as JSON in the place of a text, with the row's place, so that what is refused later can name
it. Nothing is repaired.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torchtitan.data.tokenizers.interface import encodable
from torchtitan.refusal import Refusal

_KINDS = (("messages",), ("prompt", "completion"), ("instruction", "output"))
BESIDE = ("tools", "chat_template_kwargs")  # what a template may also get
_KNOWN = "'messages', 'prompt' and 'completion', or 'instruction', 'input' and 'output'"


class Conversation(str):
    """In the place of a text_key: the rows of a source are conversations, which the encoder turns into tokens."""

    encoder: Any
    identity: str  # of what is learned and of the template; a resumed run compares it

    def names_in(self, there: Sequence[str], where: Callable[[], str]) -> list[str]:
        return fields_of(there, where)

    def compose(self, row: Mapping[str, Any], where: Callable[[], str]) -> str:
        return conversation(row, where)


def fields_of(there: Sequence[str], where: Callable[[], str]) -> list[str]:
    """The fields that make the conversation; the first of these kinds that is there counts."""
    for kind in _KINDS:
        if all(name in there for name in kind):
            others = (*BESIDE, "input") if kind == _KINDS[-1] else BESIDE
            return [*kind, *(name for name in others if name in there)]
    fix = "rename them, or remove chat if the rows are texts"
    if "conversations" in there:
        fix = "rename 'conversations' to 'messages', and in it 'from' and 'value' to 'role' and 'content'"
    found = ", ".join(map(repr, there)) or "none"
    raise Refusal(f"{where()}: the fields {found} hold no conversation; expected {_KNOWN}; {fix}")


def conversation(row: Mapping[str, Any], where: Callable[[], str]) -> str:
    """The row as JSON: its place, messages and tools, and where those begin that may be learned."""
    fields = fields_of([name for name in row if row[name] is not None], where)
    before: list[Any] = []
    if fields[0] == "messages":
        messages = _messages(row, "messages", "user", where)
    else:
        asked, answered = fields[:2]
        before = _messages(row, asked, "user", where)
        if "input" in fields and row["input"]:
            before[0]["content"] += f"\n{_text(row, 'input', where)}"
        messages = [*before, *_messages(row, answered, "assistant", where)]
    for number, message in enumerate(messages, start=1):
        _check(message, f"{where()}, message {number}")
    tools, values = row.get("tools"), row.get("chat_template_kwargs") or {}
    if not isinstance(values, dict):
        raise Refusal(
            f"{where()}: 'chat_template_kwargs' holds {type(values).__name__}, not an object; correct the row"
        )
    try:
        found = {
            "where": where(),
            "messages": messages,
            "first": len(before),
            "tools": json.loads(tools) if isinstance(tools, str) and tools else tools,
            "values": values,
        }
        return encodable(json.dumps(found, ensure_ascii=False))
    except (TypeError, ValueError) as error:  # no JSON in tools, or a date in a column of Parquet
        raise Refusal(f"{where()}: {error}; a conversation holds texts, numbers, lists and objects only") from None


def _messages(row: Mapping[str, Any], field: str, role: str, where: Callable[[], str]) -> list[Any]:
    """A list of messages as it is; a text as one message of the role."""
    value = row[field]
    if field != "messages" and isinstance(value, str):
        return [{"role": role, "content": value}]
    is_list = isinstance(value, list) and all(isinstance(message, dict) for message in value)
    if not is_list or field in ("instruction", "output") or not value:
        kind = "an empty list" if value == [] else type(value).__name__
        expected = "a text" if field in ("instruction", "output") else "a list of messages with role and content"
        raise Refusal(f"{where()}: {field!r} holds {kind}, not {expected}; correct the row")
    return [{key: each for key, each in message.items() if each is not None} for message in value]


def _text(row: Mapping[str, Any], field: str, where: Callable[[], str]) -> str:
    if not isinstance(row[field], str):
        raise Refusal(f"{where()}: {field!r} holds {type(row[field]).__name__}, not a text; correct the row")
    return str(row[field])


def _check(message: dict[str, Any], where: str) -> None:
    if not isinstance(message.get("role"), str):
        keys = ", ".join(map(repr, message)) or "none"
        raise Refusal(f"{where}: no role (its keys: {keys}); give it a role as user or assistant, and a content")
    content = message.get("content")
    if content is None and not message.get("tool_calls"):
        raise Refusal(
            f"{where}: the message of {message['role']!r} has neither content nor tool_calls; correct the row"
        )
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list) or not all(isinstance(_called(call), dict) for call in calls):
        raise Refusal(f"{where}: its tool_calls are no list of objects with a name and arguments; correct the row")
    parts = content if isinstance(content, list) else [{"text": content}] if content is not None else []
    for part in parts:
        if not isinstance(part, dict) or not isinstance(part.get("text"), str):
            kind = part.get("type", type(part).__name__) if isinstance(part, dict) else type(part).__name__
            raise Refusal(f"{where}: its content holds {kind!r}, and only text can be learned; leave the row out")


def _called(call: Any) -> Any:
    return call.get("function", call) if isinstance(call, dict) else None
