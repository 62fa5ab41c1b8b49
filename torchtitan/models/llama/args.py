"""Shapes of the Llama 2 and 3 family; no torch."""

from dataclasses import dataclass
from functools import partial

from torchtitan.config.schema import RopeScaling
from torchtitan.models.decoder.args import DecoderArgs


@dataclass(frozen=True)
class LlamaArgs(DecoderArgs):
    """The shape of one model."""

    rope_scaling: RopeScaling | None = None


_llama2 = partial(LlamaArgs, vocab_size=32000, rope_theta=10000.0, max_seq_len=4096)
_llama31 = partial(LlamaArgs, vocab_size=128256, rope_scaling=RopeScaling(factor=8.0))
_llama32 = partial(LlamaArgs, vocab_size=128256, rope_scaling=RopeScaling(factor=32.0), tied_embeddings=True)

# Llama 3's are those of 3.1 and 3.2, as in torchtitan v0.2.2.
LLAMA3_FLAVORS = {
    "debugmodel": LlamaArgs(256, 6, 16, 16, 768, rope_scaling=RopeScaling(factor=8.0)),
    # For a few CPU cores: what the benchmarks train there.
    "60M": LlamaArgs(512, 8, 8, 4, 1408, vocab_size=32000),
    "100M": LlamaArgs(768, 12, 12, 4, 2048, vocab_size=16384),
    "1B": _llama32(2048, 16, 32, 8, 8192),
    "3B": _llama32(3072, 28, 24, 8, 8192),
    "8B": _llama31(4096, 32, 32, 8, 14336),
    "70B": _llama31(8192, 80, 64, 8, 28672),
    "405B": _llama31(16384, 126, 128, 8, 53248),
}
LLAMA2_FLAVORS = {
    "7B": _llama2(4096, 32, 32, 32, 11008),
    "13B": _llama2(5120, 40, 40, 40, 13824),
    "70B": _llama2(8192, 80, 64, 8, 28672),
}
