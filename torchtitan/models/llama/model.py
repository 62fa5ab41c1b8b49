"""Llama as a plain nn.Module: it knows torch and its own shape, no device, no process group, no config.

Parameters have Llama's names. Rotary embedding rotates the two halves of a head as Hugging Face does, not Meta's
interleaved pairs: real-valued, contiguous, and the weights map to safetensors by name alone.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan.models.llama.args import LlamaArgs


def rope_table(positions: Tensor, args: LlamaArgs) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the rotation at each position, in float32."""
    half = args.head_dim // 2
    exponent = torch.arange(half, dtype=torch.float32, device=positions.device) / half
    frequency = args.rope_theta**-exponent
    if args.rope_scaling is not None:
        # Llama 3.1: low frequencies turn `factor` times slower, high ones as before, those between are blended.
        s = args.rope_scaling
        turns = s.original_max_seq_len * frequency / (2 * math.pi)
        kept = ((turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)).clamp(0, 1)
        frequency = frequency * (kept + (1 - kept) / s.factor)
    angle = positions.float()[..., None] * frequency
    return angle.cos(), angle.sin()  # each [S, D/2] or [B, S, D/2]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (x[i], x[i + D/2]) of a head by its angle."""
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)  # the same for every head
    a, b = x.float().chunk(2, dim=-1)  # [B, S, H, D/2]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).type_as(x)


class CausalAttention(nn.Module):
    """Scaled dot products under a causal mask or a given one; a module of its own, so that it can be replaced."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # [B, H, S, D]
        groups = q.shape[1] // k.shape[1]
        if groups > 1 and (mask is not None or q.dtype == torch.float32):
            # CUDA's kernels that take a mask or float32 take no grouped heads; without them all scores are stored.
            k, v, groups = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1), 1
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=groups > 1)
        return out.transpose(1, 2)  # [B, S, H, D]


class Attention(nn.Module):
    """Grouped-query attention with rotary positions."""

    def __init__(self, args: LlamaArgs) -> None:
        super().__init__()
        self.head_dim = args.head_dim
        self.wq = nn.Linear(args.dim, args.n_heads * args.head_dim, bias=False)
        self.wk = nn.Linear(args.dim, args.n_kv_heads * args.head_dim, bias=False)
        self.wv = nn.Linear(args.dim, args.n_kv_heads * args.head_dim, bias=False)
        self.wo = nn.Linear(args.n_heads * args.head_dim, args.dim, bias=False)
        self.core: nn.Module = CausalAttention()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        # -1, not the number of heads: a tensor-parallel rank holds only some of them
        q = self.wq(x).unflatten(-1, (-1, self.head_dim))  # [B, S, H, D]
        k = self.wk(x).unflatten(-1, (-1, self.head_dim))
        v = self.wv(x).unflatten(-1, (-1, self.head_dim))
        out = self.core(rotate(q, cos, sin), rotate(k, cos, sin), v, mask)
        return self.wo(out.flatten(-2))


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, args: LlamaArgs) -> None:
        super().__init__()
        self.w1 = nn.Linear(args.dim, args.hidden_dim, bias=False)
        self.w2 = nn.Linear(args.hidden_dim, args.dim, bias=False)
        self.w3 = nn.Linear(args.dim, args.hidden_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class TransformerBlock(nn.Module):
    """Attention and feed-forward, each on the normalised residual stream."""

    def __init__(self, args: LlamaArgs) -> None:
        super().__init__()
        self.attention = Attention(args)
        self.feed_forward = FeedForward(args)
        self.attention_norm = nn.RMSNorm(args.dim, eps=args.norm_eps)
        self.ffn_norm = nn.RMSNorm(args.dim, eps=args.norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin, mask)
        return x + self.feed_forward(self.ffn_norm(x))


class Transformer(nn.Module):
    """The decoder. A part of it, with `tok_embeddings`, `norm` or `output` set to None, works as a pipeline stage."""

    def __init__(self, args: LlamaArgs) -> None:
        super().__init__()
        assert args.vocab_size is not None
        self.args = args
        self.tok_embeddings = nn.Embedding(args.vocab_size, args.dim)
        # Keyed by number: a part keeps the names its layers have in the whole.
        self.layers = nn.ModuleDict({str(i): TransformerBlock(args) for i in range(args.n_layers)})
        self.norm = nn.RMSNorm(args.dim, eps=args.norm_eps)
        self.output = nn.Linear(args.dim, args.vocab_size, bias=False)
        if args.tied_embeddings:
            self.output.weight = self.tok_embeddings.weight

    def forward(self, tokens: Tensor, positions: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """Logits [B, S, V] of tokens [B, S], which stand at `positions` and attend to what the mask allows.

        Without a mask, see `document_mask`, attention is causal.
        """
        h = tokens if self.tok_embeddings is None else self.tok_embeddings(tokens)  # [B, S, C]
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        cos, sin = rope_table(positions, self.args)
        for layer in self.layers.values():
            h = layer(h, cos, sin, mask)
        h = h if self.norm is None else self.norm(h)
        return h if self.output is None else self.output(h)


def attentions(model: nn.Module) -> list[Attention]:
    """The attention module of every block; layouts and generation replace its `core`."""
    return [module for module in model.modules() if isinstance(module, Attention)]


def document_mask(document_ids: Tensor, positions: Tensor | None = None) -> Tensor:
    """True where a query, of those at `positions`, may see a key: not later, and of the same document."""
    everywhere = torch.arange(document_ids.shape[1], device=document_ids.device)
    positions = everywhere if positions is None else positions
    same = document_ids[:, positions, None] == document_ids[:, None, :]
    return (same & (everywhere <= positions[:, None]))[:, None]  # [B, 1, S of queries, S]


def initial_std(name: str, args: LlamaArgs) -> float:
    """Standard deviation a weight starts with, by its name; those of wo, w2 and w3 shrink with depth."""
    parts = name.split(".")
    if name == "output.weight" or (name == "tok_embeddings.weight" and args.tied_embeddings):
        return args.dim**-0.5
    if name == "tok_embeddings.weight":
        return 1.0
    if parts[-2] in ("wo", "w2", "w3"):
        return 0.02 / math.sqrt(2 * (int(parts[1]) + 1))
    return 0.02


@torch.no_grad()
def fill_initial(name: str, weight: Tensor, args: LlamaArgs, generator: torch.Generator) -> None:
    """Give a whole parameter its initial values: ones for norms, else a normal cut off at three deviations."""
    if name.rpartition(".")[0].endswith("norm"):
        weight.fill_(1.0)
        return
    assert weight.dim() > 1, f"say here what {name} begins with"
    std = initial_std(name, args)
    weight.normal_(0.0, std, generator=generator).clamp_(-3 * std, 3 * std)
