"""Writes the references: a JSON Schema for editors, all keys (docs/recipe/configuration.md), all verbs (docs/verbs.md).

python -m torchtitan schema
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from torchtitan.config.names import sections
from torchtitan.config.schema import DataSource, RopeScaling, Section, Whole
from torchtitan.tools import verbs

SCHEMA_FILE = Path("train_configs/schema.json")
DOC_FILE, VERBS_FILE = Path("docs/recipe/configuration.md"), Path("docs/verbs.md")
_BEGIN, _END = "<!-- keys: written by `python -m torchtitan schema` -->", "<!-- end of keys -->"
_OURS = "Not in torchtitan."  # the last words of a help text; on the page a mark
# Tables that a file may have; Config() has none of them, so sections() does not list them.
_TABLES_IN_FILES: dict[str, type[Section]] = {"[training.sources]": DataSource, "model.rope_scaling": RopeScaling}


def to_json_schema() -> str:
    """The JSON Schema from which an editor completes, explains and checks the keys of a TOML file."""
    return json.dumps(Whole.model_json_schema(), indent=1, sort_keys=True) + "\n"


def with_keys(page: str) -> str:
    """The page with new lists between its two marks: every key with its default and its help text."""
    before, after = page.split(_BEGIN)[0], page.split(_END)[1]
    lists = [_keys(name, section) for name, section in (sections() | _TABLES_IN_FILES).items()]
    return f"{before}{_BEGIN}\n\n{''.join(lists)}{_END}{after}"


HELP = "bring train_configs/schema.json, docs/recipe/configuration.md and docs/verbs.md up to date"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "The working directory must be the repository."


def run(args: argparse.Namespace, options: Sequence[str]) -> None:
    SCHEMA_FILE.write_text(to_json_schema(), encoding="utf-8")
    DOC_FILE.write_text(with_keys(DOC_FILE.read_text(encoding="utf-8")), encoding="utf-8")
    VERBS_FILE.write_text(verbs.page(), encoding="utf-8")


def _keys(name: str, section: type[Section]) -> str:
    items = []
    for key, field in section.model_fields.items():
        default = "None" if field.default is None else "required" if field.is_required() else json.dumps(field.default)
        text = (field.description or "").removesuffix(_OURS).rstrip()
        mark = " †" if field.description != text else ""
        items.append(f"- **`{key}`**{mark} `{default}`: {text}\n")
    return f"### `[{name}]`\n\n{section.__doc__}\n\n{''.join(items)}\n"
