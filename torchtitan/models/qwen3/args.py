"""Shapes of the dense Qwen3 family, and what follows from them by arithmetic; no torch."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torchtitan.config.schema import Config
from torchtitan.models.spec import Part
from torchtitan.refusal import Refusal


@dataclass(frozen=True)
class Qwen3Args:
    """The shape of one model."""

    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    hidden_dim: int
    vocab_size: int | None = None  # None: as large as the tokenizer
    head_dim: int = 128  # does not follow from dim and n_heads
    norm_eps: float = 1e-6
    rope_theta: float = 1e6
    tied_embeddings: bool = False
    max_seq_len: int = 40960

    def __post_init__(self) -> None:
        if self.head_dim % 2:
            raise Refusal(f"model.head_dim = {self.head_dim} is odd, but rotation turns pairs; use an even number")
        if self.n_heads % self.n_kv_heads:
            raise Refusal(
                f"model.n_kv_heads = {self.n_kv_heads} does not divide n_heads = {self.n_heads}, which share them in "
                "equal groups; use a divisor"
            )

    @property
    def head_size(self) -> int:
        return self.head_dim


def _published(dim: int, n_layers: int, n_heads: int, hidden_dim: int, tied: bool = False) -> Qwen3Args:
    return Qwen3Args(dim, n_layers, n_heads, 8, hidden_dim, vocab_size=151936, tied_embeddings=tied)


FLAVORS = {
    "debugmodel": Qwen3Args(256, 6, 8, 4, 768, head_dim=64),
    "0.6B": _published(1024, 28, 16, 3072, tied=True),
    "1.7B": _published(2048, 28, 16, 6144, tied=True),
    "4B": _published(2560, 36, 32, 9728, tied=True),
    "8B": _published(4096, 36, 32, 12288),
    "14B": _published(5120, 40, 40, 17408),
    "32B": _published(5120, 64, 64, 25600),
}


def parts(args: Qwen3Args, seq_len: int) -> Sequence[Part]:
    heads, kv_heads = args.n_heads * args.head_size, args.n_kv_heads * args.head_size
    norms = 2 * args.dim + 2 * args.head_size
    block = 2 * args.dim * (heads + kv_heads) + 3 * args.dim * args.hidden_dim + norms
    ends = (args.vocab_size or 1) * args.dim  # the cut of a pipeline depends on it, not whether there is one
    return [
        Part("tok_embeddings", ends, 0, "lookup"),
        *(Part(f"layers.{i}", block, 6 * block + 12 * heads * seq_len, "layer") for i in range(args.n_layers)),
        Part("norm", args.dim, 6 * args.dim),
        Part("output", ends, 6 * ends, tied=ends if args.tied_embeddings else 0),
    ]


def tied(args: Qwen3Args) -> tuple[str, str] | None:
    return ("tok_embeddings.weight", "output.weight") if args.tied_embeddings else None


def takes_muon(name: str) -> bool:
    """Matrices within layers; the rows of embedding and output are tokens, which Muon is not for."""
    return name.startswith("layers.")


def refusals(args: Qwen3Args, config: Config) -> Iterator[str]:
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
