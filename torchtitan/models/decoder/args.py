"""The shape of a decoder, and what follows from it by arithmetic; no torch."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torchtitan.config.schema import Config, RopeScaling
from torchtitan.models.spec import Part
from torchtitan.refusal import Refusal


@dataclass(frozen=True)
class DecoderArgs:
    """The shape of one model: its sizes and its parts.

    Fields are keys of [model], but for those with init=False, which a family sets for all its models.
    """

    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    hidden_dim: int
    vocab_size: int | None = None  # None: as large as the tokenizer
    head_dim: int | None = None  # None: dim / n_heads
    norm_eps: float = 1e-5
    rope_theta: float = 500000.0
    rope_scaling: RopeScaling | None = field(default=None, init=False)
    tied_embeddings: bool = False
    max_seq_len: int = 131072
    head_norms: bool = field(default=False, init=False)  # each head's query and key are normalised before they turn

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
        scaling = self.rope_scaling
        if scaling is not None and scaling.low_freq_factor >= scaling.high_freq_factor:
            raise Refusal(
                f"model.rope_scaling.low_freq_factor = {scaling.low_freq_factor} is not below high_freq_factor = "
                f"{scaling.high_freq_factor}, between which frequencies are blended; use a smaller one"
            )

    @property
    def head_size(self) -> int:
        return self.head_dim or self.dim // self.n_heads


def parts(args: DecoderArgs, seq_len: int) -> Sequence[Part]:
    heads, kv_heads = args.n_heads * args.head_size, args.n_kv_heads * args.head_size
    norms = 2 * args.dim + 2 * args.head_size * args.head_norms
    block = 2 * args.dim * (heads + kv_heads) + 3 * args.dim * args.hidden_dim + norms
    ends = (args.vocab_size or 1) * args.dim  # the cut of a pipeline depends on it, not whether there is one
    return [
        Part("tok_embeddings", ends, 0, "lookup"),
        *(Part(f"layers.{i}", block, 6 * block + 12 * heads * seq_len, "layer") for i in range(args.n_layers)),
        Part("norm", args.dim, 6 * args.dim),
        Part("output", ends, 6 * ends, tied=ends if args.tied_embeddings else 0),
    ]


def tied(args: DecoderArgs) -> tuple[str, str] | None:
    return ("tok_embeddings.weight", "output.weight") if args.tied_embeddings else None


def refusals(args: DecoderArgs, config: Config) -> Iterator[str]:
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
