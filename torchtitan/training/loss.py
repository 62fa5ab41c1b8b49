"""The training loss: a sum over tokens, so that whoever knows the whole batch can divide it once."""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from torchtitan.config.schema import Compile

IGNORED = -100  # label of a position that does not count

LossFunction = Callable[[Tensor, Tensor], Tensor]


def cross_entropy_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """Summed cross-entropy of logits [B, S, V] and labels [B, S], in float32."""
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(0, 1), ignore_index=IGNORED, reduction="sum")


def build_loss(compile_: Compile) -> LossFunction:
    """The loss, compiled where the configuration asks for it."""
    if compile_.enable and "loss" in compile_.components:
        import torch

        return torch.compile(cross_entropy_sum, backend=compile_.backend, fullgraph=True)
    return cross_entropy_sum
