"""The dense Qwen3 family, as the recipe sees it."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torchtitan.models.qwen3.args import FLAVORS, Qwen3Args, parts, refusals, takes_muon, tied
from torchtitan.models.spec import Family, HuggingFace

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.distributed.tensor.parallel.style import ParallelStyle

    from torchtitan.models.operations import Share, Work


def build(args: Qwen3Args) -> "nn.Module":
    from torchtitan.models.qwen3.model import Transformer

    return Transformer(args)


def initialize(name: str, weight: "Tensor", args: Qwen3Args, generator: "torch.Generator") -> None:
    from torchtitan.models.qwen3.model import initialize

    initialize(name, weight, args, generator)


def tensor_plan(args: Qwen3Args, split_sequence: bool, loss_parallel: bool) -> "Mapping[str, ParallelStyle]":
    from torchtitan.models.qwen3.parallelize import tensor_plan

    return tensor_plan(args, split_sequence, loss_parallel)


def operations(args: Qwen3Args, share: "Share") -> "Work":
    from torchtitan.models.decoder import decoder

    return decoder(args, share, head_norms=True)


def hugging_face() -> HuggingFace:
    from torchtitan.models.qwen3 import hf

    return HuggingFace("qwen3", hf.to_hf_name, hf.to_hf_config, hf.from_hf_config)


QWEN3 = Family(
    shape=Qwen3Args,
    flavors=FLAVORS,
    parts=parts,
    build=build,
    initialize=initialize,
    tensor_plan=tensor_plan,
    tied=tied,
    operations=operations,
    takes_muon=takes_muon,
    refusals=refusals,
    hugging_face=hugging_face,
)
