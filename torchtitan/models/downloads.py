"""The model that a downloaded folder's config.json describes. No torch."""

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from torchtitan.models.spec import Blueprint, Family, HuggingFace
from torchtitan.refusal import Refusal

_OWNERS = {"llama-": "meta-llama", "qwen": "Qwen", "smollm": "HuggingFaceTB", "gpt2": "openai-community"}


def find_download(folder: Path, specs: Mapping[str, Family], family: str | None = None) -> tuple[str, Blueprint]:
    """Read family and shape from config.json of a Hugging Face folder; refuse a model that no family reads.

    `specs`: the families that may read the folder, by name. `family`: the one that the user says it is.
    """
    path = folder / "config.json"
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise Refusal(f"{path} cannot be read ({error.strerror}); name the folder of a downloaded model") from None
    except (ValueError, RecursionError) as error:
        raise Refusal(f"{path} is not valid JSON ({error}); the file is damaged, get it again") from None
    if not isinstance(content, dict):
        raise Refusal(f"{path} holds no JSON object; the file is damaged, get it again")
    model_type = content.get("model_type")
    for name, spec in specs.items():
        hugging_face = spec.hugging_face and spec.hugging_face()
        if hugging_face is not None and (family or hugging_face.model_type == model_type):
            return name, Blueprint(str(folder), spec, _read_shape(path, hugging_face, content))
    if family:
        raise Refusal(f"{family} does not read Hugging Face's files; give its Family `hugging_face`")
    raise Refusal(
        f"{path} has model_type = {model_type!r}, which no family here is; name the one that reads it, as --model "
        f"path/to/file.py:SPEC"
    )


def name_on_the_hub(folder: Path) -> str:
    """The repository that a folder seems to be named after."""
    owner = next((owner for begin, owner in _OWNERS.items() if folder.name.lower().startswith(begin)), None)
    return f"{owner}/{folder.name}" if owner else "OWNER/NAME"


def _read_shape(path: Path, hugging_face: HuggingFace, content: dict[str, Any]) -> Any:
    """The shape that config.json describes; refused if its values are of other kinds than a shape's."""
    try:
        shape = hugging_face.from_config(content)
    except Refusal as error:
        raise Refusal(f"{path}: {error}") from None
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise Refusal(f"{path} describes no model ({type(error).__name__}: {error}); get the file again") from None
    for field in (each for each in fields(shape) if each.init and "Literal" not in str(each.type)):
        value, kinds = getattr(shape, field.name), str(field.type)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        wrong = number and not (0 < value < 2**31 and ("float" in kinds or isinstance(value, int)))
        if wrong or isinstance(value, bool) is not ("bool" in kinds) or isinstance(value, str | list | dict):
            raise Refusal(f"{path} gives {field.name} = {value!r}, which no model has; get the file again")
    return shape
