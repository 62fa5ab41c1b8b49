"""Writes YAML: tables, lists and plain values, which is all that a manifest needs."""

import json
import re
from typing import Any

_BARE = re.compile("(?!(?i:y|n|yes|no|on|off|true|false|null)$)[A-Za-z_]+")  # a key that YAML reads unquoted


def to_yaml(value: Any, indent: str = "") -> str:
    """The value as YAML. Strings are quoted as in JSON, which YAML reads alike."""
    lines = []
    for key, inner in value.items() if isinstance(value, dict) else (("-", item) for item in value):
        head = indent + (key if key == "-" else f"{key if _BARE.fullmatch(key) else json.dumps(key)}:")
        if not isinstance(inner, (dict, list)) or not inner:
            lines.append(f"{head} {json.dumps(inner, ensure_ascii=False)}\n")
        elif key == "-":  # a table inside a list begins on the line of the dash
            lines.append(f"{indent}- {to_yaml(inner, indent + '  ')[len(indent) + 2 :]}")
        else:
            lines.append(f"{head}\n{to_yaml(inner, indent + '  ')}")
    return "".join(lines)
