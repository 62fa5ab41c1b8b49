"""Families of tiny models, which tests train through the door that a user's own model comes in by."""

from dataclasses import replace

from torchtitan.config.schema import RopeScaling
from torchtitan.models.llama.args import LlamaArgs
from torchtitan.models.llama.spec import LLAMA3
from torchtitan.models.qwen3.spec import QWEN3 as QWEN3_AS_PUBLISHED
from torchtitan.models.qwen3.spec import Qwen3Args
from torchtitan.models.qwen3_moe.spec import QWEN3_MOE, Qwen3MoeArgs

# Within a test's few positions, stretched frequencies differ from plain ones only if the original length is short.
SCALED = RopeScaling(factor=8.0, original_max_seq_len=32)
TINY = LlamaArgs(dim=64, n_layers=4, n_heads=8, n_kv_heads=4, hidden_dim=160, rope_theta=10000.0)
TINY_TIED = LlamaArgs(dim=64, n_layers=4, n_heads=8, n_kv_heads=4, hidden_dim=160, tied_embeddings=True)

LLAMA = replace(
    LLAMA3,
    flavors={
        "tiny": TINY,
        "tiny-tied": TINY_TIED,
        "narrow": LlamaArgs(64, 2, 8, 8, 160),
        "wide": LlamaArgs(768, 8, 8, 8, 2048),
        "tiny-scaled": replace(TINY, rope_scaling=SCALED),
        "tiny-deep": replace(TINY, n_layers=8),
        "tiny-deep-tied": replace(TINY_TIED, n_layers=8),
    },
)

TINY_QWEN3 = Qwen3Args(dim=64, n_layers=4, n_heads=8, n_kv_heads=4, hidden_dim=160, head_dim=16, rope_theta=10000.0)

QWEN3 = replace(
    QWEN3_AS_PUBLISHED,
    flavors={"tiny": TINY_QWEN3, "tiny-tied": replace(TINY_QWEN3, tied_embeddings=True)},
)

TINY_EXPERTS = Qwen3MoeArgs(
    dim=64, n_layers=4, n_heads=8, n_kv_heads=4, hidden_dim=32, head_dim=16, rope_theta=10000.0,
    num_experts=8, experts_per_token=2, balance_rate=0.05,
)  # fmt: skip

EXPERTS = replace(QWEN3_MOE, flavors={"tiny": TINY_EXPERTS})
