"""Shapes of the Llama 2 and 3 family and what follows from them by arithmetic; no torch."""

from dataclasses import dataclass, replace

from torchtitan.refusal import Refusal


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's stretching of the low rotation frequencies for contexts longer than it was first trained on."""

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_seq_len: int = 8192


@dataclass(frozen=True)
class LlamaArgs:
    """The shape of one model."""

    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    hidden_dim: int
    vocab_size: int | None  # None: as large as the tokenizer
    norm_eps: float = 1e-5
    rope_theta: float = 500000.0
    rope_scaling: RopeScaling | None = None
    tied_embeddings: bool = False
    max_seq_len: int = 131072

    def __post_init__(self) -> None:
        if self.dim % (2 * self.n_heads):
            raise Refusal(
                f"dim = {self.dim} with n_heads = {self.n_heads}: a head's width is dim / n_heads and even, for it is "
                f"rotated by pairs; use a multiple of {2 * self.n_heads}"
            )
        if self.n_heads % self.n_kv_heads:
            raise Refusal(
                f"n_kv_heads = {self.n_kv_heads} does not divide n_heads = {self.n_heads}, which share them in equal "
                "groups; use a divisor"
            )

    @property
    def head_dim(self) -> int:
        return self.dim // self.n_heads


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


# name -> flavor -> shape. Llama 3's are those of 3.1 and 3.2 (with RoPE scaling), as in torchtitan v0.2.2.
FLAVORS: dict[str, dict[str, LlamaArgs]] = {
    "llama3": {
        "debugmodel": LlamaArgs(256, 6, 16, 16, 768, vocab_size=None, rope_scaling=_LLAMA31),
        # For a few CPU cores: what the benchmarks train there.
        "60M": LlamaArgs(512, 8, 8, 4, 1408, vocab_size=32000),
        "100M": LlamaArgs(768, 12, 12, 4, 2048, vocab_size=16384),
        "1B": _llama3(2048, 16, 32, 8192, _LLAMA32, tied=True),
        "3B": _llama3(3072, 28, 24, 8192, _LLAMA32, tied=True),
        "8B": _llama3(4096, 32, 32, 14336),
        "70B": _llama3(8192, 80, 64, 28672),
        "405B": _llama3(16384, 126, 128, 53248),
    },
    "llama2": {
        "7B": _llama2(4096, 32, 32, 32, 11008),
        "13B": _llama2(5120, 40, 40, 40, 13824),
        "70B": _llama2(8192, 80, 64, 8, 28672),
    },
}


def resolve_vocab_size(args: LlamaArgs, configured: int | None, tokenizer_size: int) -> LlamaArgs:
    """Fix the embedding's rows: the config's number, else the flavor's, else the tokenizer's."""
    vocab_size = configured or args.vocab_size or tokenizer_size
    if tokenizer_size > vocab_size:
        origin = "model.vocab_size" if configured else "the flavor's vocabulary"
        raise Refusal(
            f"the tokenizer has {tokenizer_size} ids, {origin} only {vocab_size} rows; "
            f"set model.vocab_size = {tokenizer_size} or more, or model.hf_assets_path to this model's tokenizer"
        )
    return replace(args, vocab_size=vocab_size)


def block_parameters(args: LlamaArgs) -> int:
    """Parameters of one layer."""
    kv_dim = args.n_kv_heads * args.head_dim
    return 2 * args.dim * (args.dim + kv_dim) + 3 * args.dim * args.hidden_dim + 2 * args.dim


def count_parameters(args: LlamaArgs) -> int:
    """All parameters, a tied embedding once."""
    assert args.vocab_size is not None
    embeddings = args.vocab_size * args.dim * (1 if args.tied_embeddings else 2)
    return embeddings + args.n_layers * block_parameters(args) + args.dim


def flops_per_token(args: LlamaArgs, seq_len: int) -> int:
    """Model FLOPs of forward and backward, counted as torchtitan and PaLM (arXiv:2204.02311, appendix B) do.

    6 per parameter of a matrix product (a lookup in the embedding is none) and 12 * layers * dim * seq_len for
    attention, not halved for causality.
    """
    assert args.vocab_size is not None
    lookup = 0 if args.tied_embeddings else args.vocab_size * args.dim
    return 6 * (count_parameters(args) - lookup) + 12 * args.n_layers * args.dim * seq_len
