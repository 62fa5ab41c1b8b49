"""Reads and writes Hugging Face folders: safetensors, config.json, and the tokenizer's files."""

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchtitan.data.tokenizers.files import PATTERNS, load_json, write_json
from torchtitan.parallel.parts import copy_part
from torchtitan.refusal import Refusal
from torchtitan.weights.stacks import unstacked
from torchtitan.weights.targets import make_empty, refuse_existing
from torchtitan.weights.tensors import Weights

SHARD_BYTES = 5_000_000_000
_INDEX = "model.safetensors.index.json"
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def open_hf(folder: str | Path) -> Weights:
    """The safetensors of a Hugging Face folder; only their headers are read."""
    folder = Path(folder)
    if (folder / _INDEX).is_file():
        files = files_of_index(folder / _INDEX)
    else:
        files = [folder / "model.safetensors"]
    if absent := sorted(path.name for path in files if not path.is_file()):
        raise Refusal(f"{folder} lacks {', '.join(absent)}; download all safetensors files of the model, again")
    weights = open_safetensors(files, str(folder))
    constant = ".rotary_emb.inv_freq"  # in files of 2023
    return weights.renamed({name: name for name in weights.outline if not name.endswith(constant)})


def files_of_index(index: Path) -> list[Path]:
    """The files that an index names. They lie beside it (in a cache of the hub as links), and nowhere else."""
    named = load_json(index).get("weight_map")
    if not isinstance(named, dict):
        raise Refusal(f"{index} has no weight_map; get the file again")
    for name in named.values():
        if not isinstance(name, str) or name != Path(name).name or name in ("", "..") or "\0" in name:
            raise Refusal(f"{index} names the file {str(name)[:200]!a}, which cannot lie beside it; get the file again")
    return [index.with_name(name) for name in sorted(set(named.values()))]


def open_safetensors(files: Iterable[Path], where: str) -> Weights:
    outline: dict[str, Tensor] = {}
    places: dict[str, Path] = {}
    for path in files:
        with _opened(path) as file:
            for name in file.keys():
                if name in places:
                    raise Refusal(f"{name} is in {places[name]} and in {path}; name the file that is meant")
                part = file.get_slice(name)
                outline[name] = torch.empty(part.get_shape(), dtype=_dtype(part.get_dtype(), path), device="meta")
                places[name] = path

    def fill(name: str, tensor: Tensor) -> None:
        with _opened(places[name]) as file:
            copy_part(tensor, lambda part: file.get_slice(name)[part])

    return Weights(where, outline, fill)


def save_hf(
    weights: Weights,
    folder: str,
    to_hf_name: Callable[[str], str],
    config: dict[str, Any],
    assets: str | Path,
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a Hugging Face folder, holding one tensor at a time. The last step is the rename to its name."""
    from huggingface_hub import split_state_dict_into_shards_factory

    target = refuse_existing(folder)
    writing = target.with_name(f"{target.name}.writing")
    renamed = unstacked(weights.renamed({to_hf_name(name): name for name in weights.outline}))
    mark = make_empty(writing)
    outline = {name: like.to(dtype or like.dtype) for name, like in renamed.outline.items()}
    split = split_state_dict_into_shards_factory(
        outline,
        get_storage_size=lambda like: like.nbytes,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=shard_bytes,
    )
    for file, shard in split.filename_to_tensors.items():
        write_shard(writing / file, {name: outline[name] for name in shard}, renamed)
    if split.is_sharded:
        write_json(writing / _INDEX, {"metadata": split.metadata, "weight_map": split.tensor_to_filename})
    copy_assets(assets, writing)
    write_json(writing / "config.json", config)
    if not (writing / "generation_config.json").exists():
        write_json(writing / "generation_config.json", {key: config[key] for key in ("bos_token_id", "eos_token_id")})
    mark.unlink()
    writing.rename(target)


def copy_assets(assets: str | Path, target: Path) -> None:
    """Copy the tokenizer's files and generation_config.json. A single file gets the name that readers look for."""
    assets = Path(assets)
    target.mkdir(parents=True, exist_ok=True)
    if assets.is_file():
        is_json = assets.read_bytes()[:400].lstrip().startswith(b"{")
        shutil.copyfile(assets, target / ("tokenizer.json" if is_json else "tokenizer.model"))
    for pattern in PATTERNS if assets.is_dir() else ["tokenizer_config.json"]:
        for path in (assets if assets.is_dir() else assets.parent).glob(pattern):
            if path.is_file():
                shutil.copyfile(path, target / path.name)


def write_shard(path: Path, outline: Mapping[str, Tensor], weights: Weights) -> None:
    """Write the format by hand (length, JSON header, data), because safetensors' writer needs all tensors at once."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, like in outline.items():
        begin, end = end, end + like.nbytes
        header[name] = {"dtype": _DTYPES[like.dtype], "shape": list(like.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, like in outline.items():
            file.write(weights.read(name, like.dtype).view(torch.uint8).numpy().data)


def _dtype(name: str, path: Path) -> torch.dtype:
    for dtype, known in _DTYPES.items():
        if known == name:
            return dtype
    raise Refusal(f"{path} holds weights of the type {name}; only {', '.join(_DTYPES.values())} are read")


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except SafetensorError as error:
        raise Refusal(f"{path} is damaged ({error}); get the file again") from None
