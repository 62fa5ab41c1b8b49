"""Reads tables of files that others wrote: a key may have several names, and what is missing or wrong is named."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torchtitan.refusal import Refusal


@dataclass(frozen=True)
class Keys:
    """A table, and behind it the tables that give its defaults."""

    where: str
    tables: tuple[Mapping[str, Any], ...]
    names: Mapping[str, str]  # all names of a key, in the order in which they are looked for
    assumed: list[str]  # what was guessed, to be printed
    fix: str  # what else a user can do about a table that is refused

    def find(self, key: str, default: Any = None) -> Any:
        names = self.names.get(key, key).split()
        return next((table[name] for table in self.tables for name in names if name in table), default)

    def number(self, key: str, default: float | None = None, assume: float | None = None) -> Any:
        """A missing key has the value `default`, or the guess `assume`, which the caller prints."""
        value = self.find(key, default)
        if value is None and assume is not None:
            self.assumed.append(f"{key} = {assume:g}")
            return assume
        if value is None:
            raise self.refusal(f"lacks {' or '.join(self.names.get(key, key).split())}", "add it")
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
            raise self.refusal(f"has {key} = {value!r}", "use a positive number")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.find(key, default)
        if not isinstance(value, bool):
            raise self.refusal(f"has {key} = {value!r}", "use true or false")
        return value

    def word(self, key: str, known: Iterable[str], default: str) -> str:
        value = str(self.find(key, default)).lower()
        if value not in known:
            raise self.refusal(f"has {key} = {value!r}", f"use one of {', '.join(filter(None, known))}")
        return value

    def refusal(self, what: str, fix: str) -> Refusal:
        return Refusal(f"{self.where} {what}; {fix}{self.fix}")
