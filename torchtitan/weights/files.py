"""Opens weights that another program wrote: a file of safetensors or of torch.save, or a folder of the hub."""

import pickle
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchtitan.observe.log import logger
from torchtitan.parallel.parts import copy_part
from torchtitan.refusal import Refusal
from torchtitan.weights.hugging_face import files_of_index, open_safetensors
from torchtitan.weights.tensors import Weights

DOWNLOADS = Path("assets/hf")  # where `python -m torchtitan download model` puts a folder
_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_NAMES = ("model.safetensors", "*.safetensors", "pytorch_model.bin", "*.bin", "*.pt", "*.pth", "*.ckpt")
_ENTRIES = ("state_dict", "model_state_dict", "model")  # of a file that holds more than weights


def find_files(path: str) -> list[Path]:
    """The files of weights at a path, or of the downloaded model of this name; none, if it has another kind."""
    if "://" in path:
        return []
    place = Path(path) if Path(path).exists() else DOWNLOADS / Path(path).name
    if place.is_file():
        return [place]
    for index in _INDEXES:
        if (place / index).is_file():
            return files_of_index(place / index)
    return next((found for pattern in _NAMES if (found := sorted(place.glob(pattern)))), [])


def open_files(files: Sequence[Path]) -> Weights:
    where = str(files[0] if len(files) == 1 else files[0].parent)
    if absent := [path.name for path in files if not path.is_file()]:
        raise Refusal(f"{where} lacks {', '.join(absent)}, which its index names; get all files of the model, again")
    if files[0].suffix == ".safetensors":
        return open_safetensors(files, where)
    held: dict[str, Tensor] = {}
    for path in files:
        tensors = _read(path)
        if twice := sorted(held.keys() & tensors.keys()):
            raise Refusal(f"{where} has {twice[0]} in more than one file; name the file that is meant")
        held |= tensors
    outline = {name: tensor.to("meta") for name, tensor in held.items()}
    return Weights(where, outline, lambda name, tensor: copy_part(tensor, held[name].__getitem__))


@contextmanager
def refusing_harm(path: Path) -> Iterator[None]:
    """Inside, files of torch.save are read, no code in them is run, and what cannot be read so is refused."""
    try:
        yield
    except Refusal:
        raise
    except pickle.UnpicklingError as error:
        kind = re.search(r"GLOBAL (\S+)", str(error))
        what = f"holds a {kind[1]}, and reading it could run any code" if kind else "is no file of torch.save"
        raise Refusal(
            f"{path} {what}; where it was made, save the weights alone: torch.save(model.state_dict(), file)"
        ) from None
    except Exception as error:  # a damaged pickle may ask torch for anything
        said = str(error).strip().partition("\n")[0][:200]
        why = f"{type(error).__name__}: {said}" if said else type(error).__name__
        raise Refusal(f"{path} cannot be read ({why}); give a file of torch.save or of safetensors") from None


def _read(path: Path) -> dict[str, Tensor]:
    """What torch.save wrote, where it can be mapped into memory."""
    with refusing_harm(path):
        with path.open("rb") as file:
            is_zip = file.read(2) == b"PK"  # files of torch before 1.6 are none, and cannot be mapped
        held = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    if _is_state(held):
        return held
    states = {key: value for key, value in held.items() if _is_state(value)} if isinstance(held, dict) else {}
    chosen = next((key for key in (*_ENTRIES, *(states if len(states) == 1 else ())) if key in states), None)
    if chosen is None:
        found = ", ".join(map(str, held)) if isinstance(held, dict) else type(held).__name__
        raise Refusal(f"{path} holds no state dict, or several ({found[:200]}); save one: model.state_dict()")
    logger.info(f'{path}: the weights are its entry "{chosen}"')
    return states[chosen]


def _is_state(held: Any) -> bool:
    return isinstance(held, dict) and bool(held) and all(isinstance(value, Tensor) for value in held.values())
