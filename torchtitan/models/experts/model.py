"""The decoder with experts: which layers have them, and what their weights begin with."""

import torch
from torch import Tensor, nn

from torchtitan.models.decoder.model import Transformer
from torchtitan.models.decoder.model import initialize as initialize_decoder
from torchtitan.models.experts.args import ExpertArgs
from torchtitan.models.layers import FeedForward
from torchtitan.models.mixture import MixtureOfExperts


def build(args: ExpertArgs) -> Transformer:
    def feed_forward(layer: int) -> nn.Module:
        return FeedForward(args.dim, args.dense_hidden_dim or 0) if args.is_dense(layer) else MixtureOfExperts(args)

    return Transformer(args, feed_forward)


def initialize(name: str, weight: Tensor, args: ExpertArgs, generator: torch.Generator) -> None:
    """Give a whole parameter its first values; an expert's are those of a plain network."""
    if name.endswith(".router.bias"):
        torch.nn.init.zeros_(weight)
    else:
        initialize_decoder(f"{name}.weight" if ".experts." in name else name, weight, args, generator)
