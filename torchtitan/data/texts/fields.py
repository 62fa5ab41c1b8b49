"""Which fields of a row make a document: one, or several in a template such as "{question}\\n{answer}"."""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torchtitan.refusal import Refusal

_FIELD = re.compile(r"\{([^{}]+)\}")


def names_in(text_key: Any, there: Iterable[str], where: Callable[[], str]) -> list[str]:
    if type(text_key) is not str:  # data/chat/rows.py: it depends on what is there
        return text_key.names_in(list(there), where)
    return _FIELD.findall(text_key) or [text_key]


def compose(row: Mapping[str, Any], text_key: Any, where: Any) -> Any:
    """The value of the field, or the template with a text or number in the place of each name."""
    if type(text_key) is not str:
        return text_key.compose(row, where)
    if not _FIELD.search(text_key):
        return row[text_key]

    def shown(found: re.Match[str]) -> str:
        value = row[found[1]]
        if not isinstance(value, str | int | float):
            raise Refusal(f"{where()}: {found[1]!r} holds {type(value).__name__}, no text or number; correct text_key")
        return str(value)

    return _FIELD.sub(shown, text_key)
