"""The dotted names of sections and keys."""

import functools
from collections.abc import Iterator
from typing import Any

from torchtitan.config.schema import Section, Whole


def key_names() -> list[str]:
    """All keys of the schema, dotted."""
    return [f"{section}.{key}" for section, keys in sections().items() for key in keys.model_fields]


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """A configuration's values by dotted name."""
    dotted: dict[str, Any] = {}
    for name, value in values.items():
        dotted |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return dotted


@functools.cache
def sections() -> dict[str, type[Section]]:
    """The sections of the schema that hold keys, by their dotted names, in order."""
    return dict(_sections_below(Whole(), ""))


def _sections_below(section: Section, prefix: str) -> Iterator[tuple[str, type[Section]]]:
    for name, value in section:
        if any(isinstance(inner, Section) for _, inner in value):
            yield from _sections_below(value, f"{prefix}{name}.")
        else:
            yield prefix + name, type(value)
