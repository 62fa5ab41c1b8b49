"""The shape of a decoder, and what follows from it by arithmetic; no torch."""

from collections.abc import Callable, Iterator, Mapping, Sequence
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


def parts(
    args: DecoderArgs, seq_len: int, feed_forward: Callable[[int], tuple[int, int]] | None = None
) -> Sequence[Part]:
    """`feed_forward` gives the parameters of a layer's network, and how many a token uses, where they are others."""
    heads, kv_heads = args.n_heads * args.head_size, args.n_kv_heads * args.head_size
    rest = 2 * args.dim * (heads + kv_heads) + 2 * args.dim + 2 * args.head_size * args.head_norms
    ends = (args.vocab_size or 1) * args.dim  # the cut of a pipeline depends on it, not whether there is one
    sizes = map(feed_forward or (lambda _: (3 * args.dim * args.hidden_dim,) * 2), range(args.n_layers))
    blocks = enumerate((rest + held, rest + used) for held, used in sizes)
    return [
        Part("tok_embeddings", ends, 0, "lookup"),
        *(Part(f"layers.{i}", n, 6 * k + 12 * heads * seq_len, "layer", unused=n - k) for i, (n, k) in blocks),
        Part("norm", args.dim, 6 * args.dim),
        Part("output", ends, 6 * ends, tied=ends if args.tied_embeddings else 0),
    ]


def tied(args: DecoderArgs) -> tuple[str, str] | None:
    return ("tok_embeddings.weight", "output.weight") if args.tied_embeddings else None


def refusals(args: DecoderArgs, config: Config, others: Mapping[str, int] | None = None) -> Iterator[str]:
    """Tensor parallelism splits heads evenly, and `others`: if None, hidden units."""
    degree = config.parallelism.tensor_parallel_degree
    counts = {"KV heads": args.n_kv_heads, **({"hidden units": args.hidden_dim} if others is None else others)}
    for what, count in {"heads": args.n_heads, **counts}.items():
        if count % degree:
            fitting = [d for d in range(1, args.n_kv_heads + 1) if all(each % d == 0 for each in counts.values())]
            yield (
                f"parallelism.tensor_parallel_degree = {degree} does not divide the model's {count} {what}; "
                f"use one of {', '.join(map(str, fitting))}"
            )
            return
