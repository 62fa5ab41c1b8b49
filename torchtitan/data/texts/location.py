"""Where a text is."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Kind = Literal["jsonl", "streamed", "parquet", "text", "saved", "prepared", "hub"]
FileKind = Literal["jsonl", "streamed", "parquet", "text"]
IN_ANY_ORDER = ("jsonl", "text", "saved", "prepared")


@dataclass(frozen=True)
class Location:
    """Where a text is: its kind, and its files or its repository on the hub. JSON lines are `streamed` or indexed."""

    kind: Kind
    files: tuple[Path, ...] = ()
    hub: tuple[str, str | None, str] | None = None

    @property
    def name(self) -> str:
        return self.hub[0] if self.hub else str(self.files[0]) + (" ..." if len(self.files) > 1 else "")
