"""The schema in the forms its readers use: JSON Schema for editors, tables for people.

python -m torchtitan schema
"""

import json
from pathlib import Path

from torchtitan.config.load import sections
from torchtitan.config.schema import Config, Section

SCHEMA_FILE = Path("train_configs/schema.json")
DOC_FILE = Path("docs/configuration.md")
_BEGIN, _END = "<!-- keys: written by `python -m torchtitan schema` -->", "<!-- end of keys -->"


def to_json_schema() -> str:
    """Completion, docs and errors while a TOML file is written."""
    return json.dumps(Config.model_json_schema(), indent=1, sort_keys=True) + "\n"


def with_key_tables(page: str) -> str:
    """The page with every key, its default and its doc between the two marks."""
    before, after = page.split(_BEGIN)[0], page.split(_END)[1]
    tables = [_table(name, section) for name, section in sections().items()]
    return f"{before}{_BEGIN}\n\n{''.join(tables)}{_END}{after}"


def write_all() -> None:
    """Bring both files up to date; from the repository's top level."""
    SCHEMA_FILE.write_text(to_json_schema(), encoding="utf-8")
    DOC_FILE.write_text(with_key_tables(DOC_FILE.read_text(encoding="utf-8")), encoding="utf-8")


def _table(name: str, section: type[Section]) -> str:
    rows = []
    for key, field in section.model_fields.items():
        default = "none" if field.default is None else json.dumps(field.default)
        rows.append(f"| `{key}` | `{default}` | {field.description} |\n".replace("\\", ""))
    doc = (section.__doc__ or "").strip()
    return f"### `[{name}]`\n\n{doc}\n\n| key | default | |\n| --- | --- | --- |\n{''.join(rows)}\n"
