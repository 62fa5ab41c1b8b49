"""Qwen3 with experts: each token uses 8 of 128, whose scores are a softmax, normalised over the chosen."""

from dataclasses import dataclass, field, replace
from functools import partial

from torchtitan.models.experts.args import ExpertArgs
from torchtitan.models.experts.family import EXPERTS
from torchtitan.models.spec import HuggingFace


@dataclass(frozen=True)
class Qwen3MoeArgs(ExpertArgs):
    """The shape of one model."""

    head_dim: int = 128
    norm_eps: float = 1e-6
    rope_theta: float = 1e6
    max_seq_len: int = 40960
    num_experts: int = 128
    experts_per_token: int = 8
    head_norms: bool = field(default=True, init=False)


_published = partial(Qwen3MoeArgs, vocab_size=151936)

FLAVORS = {
    "debugmodel": Qwen3MoeArgs(256, 4, 8, 4, 256, head_dim=32, num_experts=8, experts_per_token=2, balance_rate=0.05),
    "30B-A3B": _published(2048, 48, 32, 4, 768),
    "235B-A22B": _published(4096, 94, 64, 4, 1536),
}


def _hugging_face() -> HuggingFace:
    from torchtitan.models.experts.hf import ExpertFiles

    return ExpertFiles(
        "Qwen3Moe",
        Qwen3MoeArgs,
        absent={"max_position_embeddings": 32768, "norm_topk_prob": False},
        model_type="qwen3_moe",
        router="mlp.gate",
        expert="mlp.experts.*.{}_proj",
        parts={"w1": "gate", "w2": "down", "w3": "up"},
        sizes={"moe_intermediate_size": "hidden_dim", "num_experts": "num_experts"},
        block={"attention.q_norm": "self_attn.q_norm", "attention.k_norm": "self_attn.k_norm"},
        fixed={
            "use_sliding_window": (False,),
            "decoder_sparse_step": (1,),
            "mlp_only_layers": (None, []),
            "norm_topk_prob": (True,),
        },
        written={
            "use_sliding_window": False,
            "sliding_window": None,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "norm_topk_prob": True,
        },
    ).hugging_face


QWEN3_MOE = replace(EXPERTS, shape=Qwen3MoeArgs, flavors=FLAVORS, hugging_face=_hugging_face)
