"""Mixtral: each token uses two of eight experts, whose scores are a softmax, normalised over the chosen."""

from dataclasses import dataclass, replace

from torchtitan.models.experts.args import ExpertArgs
from torchtitan.models.experts.family import EXPERTS
from torchtitan.models.spec import HuggingFace


@dataclass(frozen=True)
class MixtralArgs(ExpertArgs):
    """The shape of one model."""

    rope_theta: float = 1e6
    max_seq_len: int = 32768


FLAVORS = {
    "debugmodel": MixtralArgs(256, 4, 8, 4, 256, balance_rate=0.05),
    "8x7B": MixtralArgs(4096, 32, 32, 8, 14336, vocab_size=32000, balance_rate=0.02),
    "8x22B": MixtralArgs(6144, 56, 48, 8, 16384, vocab_size=32768, max_seq_len=65536),
}


def _hugging_face() -> HuggingFace:
    from torchtitan.models.experts.hf import ExpertFiles

    return ExpertFiles(
        "Mixtral",
        MixtralArgs,
        absent={
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "num_key_value_heads": 8,
        },
        router="block_sparse_moe.gate",
        expert="block_sparse_moe.experts.*.{}",
        parts={"w1": "w1", "w2": "w2", "w3": "w3"},
        sizes={"intermediate_size": "hidden_dim", "num_local_experts": "num_experts"},
        fixed={"sliding_window": (None,), "router_jitter_noise": (0.0,)},
        written={"sliding_window": None, "router_jitter_noise": 0.0},
        may_miss=("num_key_value_heads", "head_dim"),
    ).hugging_face


MIXTRAL = replace(EXPERTS, shape=MixtralArgs, flavors=FLAVORS, hugging_face=_hugging_face)
