"""Which fields of a row make a document: one, or several in a template such as "{question}\\n{answer}"."""

import re
from collections.abc import Mapping
from typing import Any

from torchtitan.refusal import Refusal

_FIELD = re.compile(r"\{([^{}]+)\}")


def names_in(text_key: str) -> list[str]:
    return _FIELD.findall(text_key) or [text_key]


def compose(row: Mapping[str, Any], text_key: str, where: Any) -> Any:
    """The value of the field, or the template with a text or number in the place of each name."""
    if not _FIELD.search(text_key):
        return row[text_key]

    def shown(found: re.Match[str]) -> str:
        value = row[found[1]]
        if not isinstance(value, str | int | float):
            raise Refusal(f"{where()}: {found[1]!r} holds {type(value).__name__}, no text or number; correct text_key")
        return str(value)

    return _FIELD.sub(shown, text_key)
