"""Meta's own files of a Llama: params.json, and weights in consolidated.*.pth, which stay on the disk until read.

Meta's weights have our names, other rows in wq and wk, and may lie in parts.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchtitan.config.schema import RopeScaling
from torchtitan.models.decoder.model import Transformer
from torchtitan.models.llama.args import LLAMA2_FLAVORS, LLAMA3_FLAVORS, LlamaArgs
from torchtitan.models.spec import OtherFormat
from torchtitan.refusal import Refusal


def open_meta(folder: Path) -> OtherFormat:
    """The model in a folder that holds params.json."""
    paths = sorted(folder.glob("consolidated.*.pth"))
    files: list[Mapping[str, Tensor]] = [
        torch.load(path, map_location="cpu", mmap=True, weights_only=True) for path in paths
    ]
    if not files or "output.weight" not in files[0]:
        raise Refusal(f"{folder} has params.json, but no consolidated.*.pth with a Llama in it; download all files")
    args = shape_of(
        json.loads((folder / "params.json").read_bytes()), vocab_size=len(files[0]["output.weight"]) * len(files)
    )
    with torch.device("meta"):
        shapes = {name: parameter.shape for name, parameter in Transformer(args).named_parameters()}
    left_out = {"rope.freqs"} | ({"output.weight"} if args.tied_embeddings else set())
    outline = {}
    for name, part in files[0].items():
        if name in shapes:
            whole = whole_shape(part.shape, shapes[name], len(files))
            outline[name] = torch.empty(whole, dtype=part.dtype, device="meta")
        elif name not in left_out:
            outline[name] = part.to("meta")
    return OtherFormat(args, outline, lambda name: join([file[name] for file in files], name, shapes[name], args))


def shape_of(params: dict[str, Any], vocab_size: int) -> LlamaArgs:
    """The shape that params.json describes; it does not tell 3.1's rotation and embedding from 3.2's, flavors do."""
    hidden_dim = int((params.get("ffn_dim_multiplier") or 1) * int(8 * params["dim"] / 3))
    multiple = params["multiple_of"]
    args = LlamaArgs(
        dim=params["dim"],
        n_layers=params["n_layers"],
        n_heads=params["n_heads"],
        n_kv_heads=params.get("n_kv_heads") or params["n_heads"],
        hidden_dim=-(-hidden_dim // multiple) * multiple,
        vocab_size=vocab_size,
        norm_eps=params["norm_eps"],
        rope_theta=params.get("rope_theta", 10000.0),
        rope_scaling=RopeScaling() if params.get("use_scaled_rope") else None,
    )
    known = [*LLAMA3_FLAVORS.values(), *LLAMA2_FLAVORS.values()]
    return next((flavor for flavor in known if _seen_by_meta(flavor) == _seen_by_meta(args)), args)


def _seen_by_meta(args: LlamaArgs) -> LlamaArgs:
    """The shape without what params.json leaves out."""
    scaling = RopeScaling() if args.rope_scaling else None
    return replace(args, rope_scaling=scaling, tied_embeddings=False, max_seq_len=0)


def whole_shape(part: torch.Size, wanted: torch.Size, count: int) -> torch.Size:
    """The shape of all parts together, split along the one dimension that is short."""
    if part == wanted or len(part) != len(wanted):
        return part
    short = [i for i in range(len(part)) if part[i] * count == wanted[i] != part[i]]
    return torch.Size(size * count if i in short[:1] else size for i, size in enumerate(part))


def join(parts: Sequence[Tensor], name: str, shape: torch.Size, args: LlamaArgs) -> Tensor:
    """A weight from its parts, which split one dimension or are each the whole."""
    dim = next((d for d, size in enumerate(shape) if parts[0].shape[d] != size), None)
    weight = parts[0] if dim is None else torch.cat(list(parts), dim)
    heads = {"wq": args.n_heads, "wk": args.n_kv_heads}.get(name.split(".")[-2])
    if heads is None:
        return weight
    # Meta rotates neighbours (2i, 2i + 1) of a head, this model i and i + D/2: rows change places.
    return weight.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)  # [H, D/2, 2, C] -> [H, 2, D/2, C]
