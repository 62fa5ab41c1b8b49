"""The decoder as a plain nn.Module: it knows torch and its own shape, no device, no process group, no config.

Parameters have Llama's names, and map to Hugging Face's safetensors by name alone.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from torchtitan.models.decoder.args import DecoderArgs
from torchtitan.models.layers import CausalAttention, FeedForward, fill_normal, rope_table, rotate


class Attention(nn.Module):
    """Grouped-query attention with rotary positions, and in some families norms on each head's query and key."""

    def __init__(self, args: DecoderArgs) -> None:
        super().__init__()
        self.head_size = args.head_size
        self.wq = nn.Linear(args.dim, args.n_heads * args.head_size, bias=False)
        self.wk = nn.Linear(args.dim, args.n_kv_heads * args.head_size, bias=False)
        self.wv = nn.Linear(args.dim, args.n_kv_heads * args.head_size, bias=False)
        self.wo = nn.Linear(args.n_heads * args.head_size, args.dim, bias=False)
        self.q_norm, self.k_norm = (  # one weight for all heads
            nn.RMSNorm(args.head_size, eps=args.norm_eps) if args.head_norms else nn.Identity() for _ in range(2)
        )
        self.core: nn.Module = CausalAttention()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        # -1, not the number of heads: a tensor-parallel rank holds only some of them
        q = self.q_norm(self.wq(x).unflatten(-1, (-1, self.head_size)))  # [B, S, H, D]
        k = self.k_norm(self.wk(x).unflatten(-1, (-1, self.head_size)))
        v = self.wv(x).unflatten(-1, (-1, self.head_size))
        out = self.core(rotate(q, cos, sin), rotate(k, cos, sin), v, mask)
        return self.wo(out.flatten(-2))


class TransformerBlock(nn.Module):
    """Attention and feed-forward, each on the normalised residual stream."""

    def __init__(self, args: DecoderArgs, feed_forward: nn.Module | None = None) -> None:
        super().__init__()
        self.attention = Attention(args)
        self.feed_forward = feed_forward or FeedForward(args.dim, args.hidden_dim)
        self.attention_norm = nn.RMSNorm(args.dim, eps=args.norm_eps)
        self.ffn_norm = nn.RMSNorm(args.dim, eps=args.norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin, mask)
        return x + self.feed_forward(self.ffn_norm(x))


class Transformer(nn.Module):
    """The decoder. A part of it, with `tok_embeddings`, `norm` or `output` set to None, works as a pipeline stage.

    `feed_forward` makes the network of a layer, where it is another.
    """

    def __init__(self, args: DecoderArgs, feed_forward: Callable[[int], nn.Module | None] = lambda _: None) -> None:
        super().__init__()
        assert args.vocab_size is not None
        self.args = args
        self.tok_embeddings = nn.Embedding(args.vocab_size, args.dim)
        # Keyed by number: a part keeps the names its layers have in the whole.
        self.layers = nn.ModuleDict({str(i): TransformerBlock(args, feed_forward(i)) for i in range(args.n_layers)})
        self.norm = nn.RMSNorm(args.dim, eps=args.norm_eps)
        self.output = nn.Linear(args.dim, args.vocab_size, bias=False)
        if args.tied_embeddings:
            self.output.weight = self.tok_embeddings.weight

    def forward(self, tokens: Tensor, positions: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """Logits [B, S, V] of tokens [B, S], which stand at `positions` and attend to what the mask allows.

        Without a mask attention is causal. `core` takes the mask, of whatever kind the module in its place knows.
        """
        h = tokens if self.tok_embeddings is None else self.tok_embeddings(tokens)  # [B, S, C]
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        cos, sin = rope_table(positions, self.args.head_size, self.args.rope_theta, self.args.rope_scaling)
        for layer in self.layers.values():
            h = layer(h, cos, sin, mask)
        h = h if self.norm is None else self.norm(h)
        return h if self.output is None else self.output(h)


def initialize(name: str, weight: Tensor, args: DecoderArgs, generator: torch.Generator) -> None:
    """Give a whole parameter its first values; those of wo, w2 and w3 shrink with depth (docs/log.md)."""
    module = name.rpartition(".")[0]
    if module.endswith("norm"):
        torch.nn.init.ones_(weight)
    elif name == "output.weight" or (name == "tok_embeddings.weight" and args.tied_embeddings):
        fill_normal(weight, args.dim**-0.5, generator)
    elif name == "tok_embeddings.weight":
        fill_normal(weight, 1.0, generator)
    elif module.endswith((".wo", ".w2", ".w3")):
        fill_normal(weight, 0.02 / math.sqrt(2 * (int(name.split(".")[1]) + 1)), generator)
    else:
        assert weight.dim() > 1, f"say here what {name} begins with"
        fill_normal(weight, 0.02, generator)
