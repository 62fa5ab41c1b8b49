"""Modules that decoders share: rotary positions, causal attention, a gated feed-forward, initial values.

Rotation turns the two halves of a head against each other, as Hugging Face's files have it.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan.config.schema import RopeScaling


def rope_table(
    positions: Tensor, head_size: int, theta: float, scaling: RopeScaling | None = None
) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the rotation at each position, in float32."""
    exponent = torch.arange(0, head_size, 2, dtype=torch.float32, device=positions.device) / head_size
    frequency = 1 / theta**exponent  # these operations in this order: far positions show the last bit
    if scaling is not None:
        # Llama 3.1: low frequencies turn `factor` times slower, high ones as before, those between are blended.
        wavelength, low, high = 2 * math.pi / frequency, scaling.low_freq_factor, scaling.high_freq_factor
        kept = (scaling.original_max_seq_len / wavelength - low) / (high - low)
        blended = (1 - kept) * frequency / scaling.factor + kept * frequency
        slowed = torch.where(kept <= 0, frequency / scaling.factor, blended)
        frequency = torch.where(kept >= 1, frequency, slowed)
    angle = positions.float()[..., None] * frequency
    return angle.cos(), angle.sin()  # each [S, D/2] or [B, S, D/2]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (x[i], x[i + D/2]) of a head by its angle."""
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)  # the same for every head
    a, b = x.float().chunk(2, dim=-1)  # [B, S, H, D/2]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).type_as(x)


class CausalAttention(nn.Module):
    """Scaled dot products under a causal mask or a given one.

    A module of its own, because layouts and generation exchange it (`exchange_attention`).
    """

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # [B, H, S, D]
        groups = q.shape[1] // k.shape[1]
        if groups > 1 and (mask is not None or q.dtype == torch.float32):
            # CUDA's kernels that take a mask or float32 take no grouped heads; without them all scores are stored.
            k, v, groups = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1), 1
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=groups > 1)
        return out.transpose(1, 2)  # [B, S, H, D]


def exchange_attention(model: nn.Module, make: Callable[[nn.Module], nn.Module]) -> int:
    """Replace every CausalAttention by another module. Returns how many there were."""
    found = [
        (parent, name)
        for parent in model.modules()
        for name, child in parent.named_children()
        if isinstance(child, CausalAttention)
    ]
    for parent, name in found:
        setattr(parent, name, make(getattr(parent, name)))
    return len(found)


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, hidden_dim, bias=False)
        self.w2 = nn.Linear(hidden_dim, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


@torch.no_grad()
def fill_normal(weight: Tensor, std: float, generator: torch.Generator) -> None:
    """Fill with a normal distribution, cut off at three standard deviations."""
    weight.normal_(0.0, std, generator=generator).clamp_(-3 * std, 3 * std)
