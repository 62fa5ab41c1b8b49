"""Context parallelism: a rank holds two pieces of every sequence and gathers the other ranks' keys and values.

The sequence is cut into 2n pieces. Rank r of n holds piece r (its head) and piece 2n-1-r (its tail), so all ranks
attend to equally many keys. A piece runs plain attention over the prefix it may see, on gloo as on NCCL.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention.bias import CausalBias, causal_lower_right

try:
    from torch.distributed._functional_collectives import all_gather_single_autograd
except ImportError:  # its name before torch 2.13
    from torch.distributed._functional_collectives import all_gather_tensor_autograd as all_gather_single_autograd


def own_positions(seq_len: int, axis: DeviceMesh, device: torch.device) -> Tensor:
    """Return the positions of a sequence that this rank holds, in this rank's order."""
    size, rank = axis.size(), axis.get_local_rank()
    pieces = torch.arange(seq_len, device=device).chunk(2 * size)
    return torch.cat([pieces[rank], pieces[2 * size - 1 - rank]])


@dataclass(frozen=True)
class CausalPieces:
    """The causal biases of the head and the tail piece. Not a tuple, because a pipeline splits tuples by batch."""

    head: CausalBias
    tail: CausalBias
    # torch 2.11's zero-bubble schedules read these two attributes from every input of a stage.
    requires_grad: ClassVar[bool] = False
    grad_fn: ClassVar[None] = None

    def __iter__(self) -> Iterator[CausalBias]:
        return iter((self.head, self.tail))


def piece_masks(seq_len: int, axis: DeviceMesh) -> CausalPieces:
    """Return the masks of this rank's two pieces.

    The caller builds them outside the model, because a compiled or recomputed block cannot create a causal bias.
    """
    size, rank = axis.size(), axis.get_local_rank()
    piece_len = seq_len // (2 * size)
    return CausalPieces(
        head=causal_lower_right(piece_len, (rank + 1) * piece_len),
        tail=causal_lower_right(piece_len, (2 * size - rank) * piece_len),
    )


class GatheredAttention(nn.Module):
    """Attention of this rank's queries [B, S/n, H, D] over the keys and values of all ranks of the axis."""

    def __init__(self, axis: DeviceMesh) -> None:
        super().__init__()
        self.group, self.size, self.rank = axis.get_group(), axis.size(), axis.get_local_rank()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, masks: Iterable[Any]) -> Tensor:
        k, v = self._gather(torch.stack([k, v])).unbind(0)  # each [B, S, H, D]
        piece_len = q.shape[1] // 2
        out = []
        for q_piece, mask, place in zip(
            q.chunk(2, dim=1), masks, (self.rank, 2 * self.size - 1 - self.rank), strict=True
        ):
            seen = (place + 1) * piece_len
            out.append(self.attend(q_piece, k[:, :seen], v[:, :seen], mask))
        return torch.cat(out, dim=1)  # [B, S/n, H, D]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: CausalBias) -> Tensor:
        """Attention of a piece's queries to the keys and values up to its last position."""
        # Repeat each key head for all of its query heads, because some of CUDA's kernels do not accept grouped heads.
        groups = q.shape[2] // k.shape[2]
        k, v = (k, v) if groups == 1 else (k.repeat_interleave(groups, 2), v.repeat_interleave(groups, 2))
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)

    def _gather(self, kv: Tensor) -> Tensor:
        """Gather all keys and values [2, B, S, H, D] in sequence order; backward sums their gradients over ranks."""
        pieces = all_gather_single_autograd(kv.contiguous(), 2, self.group).chunk(2 * self.size, dim=2)
        return torch.cat([*pieces[::2], *reversed(pieces[1::2])], dim=2)
