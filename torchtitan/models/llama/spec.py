"""The Llama 2 and 3 families, as the recipe sees them."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from torchtitan.models.llama.args import LLAMA2_FLAVORS, LLAMA3_FLAVORS, LlamaArgs, parts, refusals, takes_muon, tied
from torchtitan.models.spec import Family, HuggingFace, OtherFormat

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.distributed.tensor.parallel.style import ParallelStyle

    from torchtitan.models.operations import Share, Work


def build(args: LlamaArgs) -> "nn.Module":
    from torchtitan.models.llama.model import Transformer

    return Transformer(args)


def initialize(name: str, weight: "Tensor", args: LlamaArgs, generator: "torch.Generator") -> None:
    from torchtitan.models.llama.model import initialize

    initialize(name, weight, args, generator)


def tensor_plan(args: LlamaArgs, split_sequence: bool, loss_parallel: bool) -> "Mapping[str, ParallelStyle]":
    from torchtitan.models.llama.parallelize import tensor_plan

    return tensor_plan(args, split_sequence, loss_parallel)


def operations(args: LlamaArgs, share: "Share") -> "Work":
    from torchtitan.models.decoder import decoder

    return decoder(args, share)


def hugging_face() -> HuggingFace:
    from torchtitan.models.llama import hf

    return HuggingFace("llama", hf.to_hf_name, hf.to_hf_config, hf.from_hf_config)


def open_meta(folder: Path) -> OtherFormat:
    from torchtitan.models.llama.meta import open_meta

    return open_meta(folder)


def _family(flavors: Mapping[str, LlamaArgs]) -> Family:
    return Family(
        shape=LlamaArgs,
        flavors=flavors,
        parts=parts,
        build=build,
        initialize=initialize,
        tensor_plan=tensor_plan,
        tied=tied,
        operations=operations,
        takes_muon=takes_muon,
        refusals=refusals,
        hugging_face=hugging_face,
        other_formats={"params.json": open_meta},
    )


LLAMA3 = _family(LLAMA3_FLAVORS)
LLAMA2 = _family(LLAMA2_FLAVORS)
