"""Families of tiny models, which tests train through the door that a user's own model comes in by."""

from dataclasses import replace

from torchtitan.models.llama.args import LlamaArgs
from torchtitan.models.llama.spec import LLAMA3

TINY = LlamaArgs(dim=64, n_layers=4, n_heads=8, n_kv_heads=4, hidden_dim=160, rope_theta=10000.0)
TINY_TIED = LlamaArgs(dim=64, n_layers=4, n_heads=8, n_kv_heads=4, hidden_dim=160, tied_embeddings=True)

LLAMA = replace(
    LLAMA3,
    flavors={
        "tiny": TINY,
        "tiny-tied": TINY_TIED,
        "tiny-deep": replace(TINY, n_layers=8),
        "tiny-deep-tied": replace(TINY_TIED, n_layers=8),
    },
)
