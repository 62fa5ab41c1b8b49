"""The dense Qwen3 family: a decoder with norms on queries and keys, and heads whose size does not follow from dim."""

from dataclasses import dataclass, field, replace
from functools import partial

from torchtitan.models.decoder.args import DecoderArgs
from torchtitan.models.decoder.family import DECODER
from torchtitan.models.spec import HuggingFace


@dataclass(frozen=True)
class Qwen3Args(DecoderArgs):
    """The shape of one model."""

    head_dim: int = 128
    norm_eps: float = 1e-6
    rope_theta: float = 1e6
    max_seq_len: int = 40960
    head_norms: bool = field(default=True, init=False)


_published = partial(Qwen3Args, vocab_size=151936)

FLAVORS = {
    "debugmodel": Qwen3Args(256, 6, 8, 4, 768, head_dim=64),
    "0.6B": _published(1024, 28, 16, 8, 3072, tied_embeddings=True),
    "1.7B": _published(2048, 28, 16, 8, 6144, tied_embeddings=True),
    "4B": _published(2560, 36, 32, 8, 9728, tied_embeddings=True),
    "8B": _published(4096, 36, 32, 8, 12288),
    "14B": _published(5120, 40, 40, 8, 17408),
    "32B": _published(5120, 64, 64, 8, 25600),
}


def _hugging_face() -> HuggingFace:
    from torchtitan.models.decoder.hf import DecoderFiles

    return DecoderFiles(
        "Qwen3",
        Qwen3Args,
        absent={"max_position_embeddings": 32768},
        block={"attention.q_norm": "self_attn.q_norm", "attention.k_norm": "self_attn.k_norm"},
        fixed={"use_sliding_window": (False,)},  # sliding_window itself has no effect while it is not used
        written={"use_sliding_window": False, "sliding_window": None},
    ).hugging_face


QWEN3 = replace(DECODER, shape=Qwen3Args, flavors=FLAVORS, hugging_face=_hugging_face)
