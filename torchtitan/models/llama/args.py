"""Shapes of the Llama 2 and 3 family, and what follows from them by arithmetic; no torch."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torchtitan.config.schema import Config, RopeScaling
from torchtitan.models.spec import Part
from torchtitan.refusal import Refusal


@dataclass(frozen=True)
class LlamaArgs:
    """The shape of one model."""

    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    hidden_dim: int
    vocab_size: int | None = None  # None: as large as the tokenizer
    head_dim: int | None = None  # None: dim / n_heads
    norm_eps: float = 1e-5
    rope_theta: float = 500000.0
    rope_scaling: RopeScaling | None = None
    tied_embeddings: bool = False
    max_seq_len: int = 131072

    def __post_init__(self) -> None:
        if self.head_dim is None and self.dim % (2 * self.n_heads):
            raise Refusal(
                f"model.dim = {self.dim} with n_heads = {self.n_heads}: a head is dim / n_heads wide, and its width "
                f"must be even, because rotation turns pairs; use a multiple of {2 * self.n_heads}, or set head_dim"
            )
        if self.head_dim is not None and self.head_dim % 2:
            raise Refusal(f"model.head_dim = {self.head_dim} is odd, but rotation turns pairs; use an even number")
        if self.n_heads % self.n_kv_heads:
            raise Refusal(
                f"model.n_kv_heads = {self.n_kv_heads} does not divide n_heads = {self.n_heads}, which share them in "
                "equal groups; use a divisor"
            )

    @property
    def head_size(self) -> int:
        return self.head_dim or self.dim // self.n_heads


_LLAMA31 = RopeScaling(factor=8.0)
_LLAMA32 = RopeScaling(factor=32.0)


def _llama2(dim: int, n_layers: int, n_heads: int, n_kv_heads: int, hidden_dim: int) -> LlamaArgs:
    return LlamaArgs(
        dim, n_layers, n_heads, n_kv_heads, hidden_dim, vocab_size=32000, rope_theta=10000.0, max_seq_len=4096
    )


def _llama3(
    dim: int, n_layers: int, n_heads: int, hidden_dim: int, scaling: RopeScaling = _LLAMA31, tied: bool = False
) -> LlamaArgs:
    return LlamaArgs(
        dim, n_layers, n_heads, 8, hidden_dim, vocab_size=128256, rope_scaling=scaling, tied_embeddings=tied
    )


# Llama 3's are those of 3.1 and 3.2 (with RoPE scaling), as in torchtitan v0.2.2.
LLAMA3_FLAVORS = {
    "debugmodel": LlamaArgs(256, 6, 16, 16, 768, rope_scaling=_LLAMA31),
    # For a few CPU cores: what the benchmarks train there.
    "60M": LlamaArgs(512, 8, 8, 4, 1408, vocab_size=32000),
    "100M": LlamaArgs(768, 12, 12, 4, 2048, vocab_size=16384),
    "1B": _llama3(2048, 16, 32, 8192, _LLAMA32, tied=True),
    "3B": _llama3(3072, 28, 24, 8192, _LLAMA32, tied=True),
    "8B": _llama3(4096, 32, 32, 14336),
    "70B": _llama3(8192, 80, 64, 28672),
    "405B": _llama3(16384, 126, 128, 53248),
}
LLAMA2_FLAVORS = {
    "7B": _llama2(4096, 32, 32, 32, 11008),
    "13B": _llama2(5120, 40, 40, 40, 13824),
    "70B": _llama2(8192, 80, 64, 8, 28672),
}


def parts(args: LlamaArgs, seq_len: int) -> Sequence[Part]:
    heads, kv_heads = args.n_heads * args.head_size, args.n_kv_heads * args.head_size
    block = 2 * args.dim * (heads + kv_heads) + 3 * args.dim * args.hidden_dim + 2 * args.dim
    ends = (args.vocab_size or 1) * args.dim  # the cut of a pipeline depends on it, not whether there is one
    return [
        Part("tok_embeddings", ends, 0, "lookup"),
        *(Part(f"layers.{i}", block, 6 * block + 12 * heads * seq_len, "layer") for i in range(args.n_layers)),
        Part("norm", args.dim, 6 * args.dim),
        Part("output", ends, 6 * ends, tied=ends if args.tied_embeddings else 0),
    ]


def tied(args: LlamaArgs) -> tuple[str, str] | None:
    return ("tok_embeddings.weight", "output.weight") if args.tied_embeddings else None


def takes_muon(name: str) -> bool:
    """Matrices within layers; the rows of embedding and output are tokens, which Muon is not for."""
    return name.startswith("layers.")


def refusals(args: LlamaArgs, config: Config) -> Iterator[str]:
    """Tensor parallelism splits heads and hidden units evenly."""
    degree = config.parallelism.tensor_parallel_degree
    for what, count in [("heads", args.n_heads), ("KV heads", args.n_kv_heads), ("hidden units", args.hidden_dim)]:
        if count % degree:
            fitting = [d for d in range(1, args.n_kv_heads + 1) if args.n_kv_heads % d == args.hidden_dim % d == 0]
            yield (
                f"parallelism.tensor_parallel_degree = {degree} does not divide the model's {count} {what}; "
                f"use one of {', '.join(map(str, fitting))}"
            )
            return
