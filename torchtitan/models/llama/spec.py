"""The Llama 2 and 3 families, as the recipe sees them."""

from dataclasses import replace
from pathlib import Path

from torchtitan.models.decoder.family import DECODER
from torchtitan.models.llama.args import LLAMA2_FLAVORS, LLAMA3_FLAVORS, LlamaArgs
from torchtitan.models.spec import HuggingFace, OtherFormat


def _hugging_face() -> HuggingFace:
    from torchtitan.models.decoder.hf import DecoderFiles

    return DecoderFiles(
        "Llama",
        LlamaArgs,
        absent={"max_position_embeddings": 2048},
        fixed={"mlp_bias": (False,), "sliding_window": (None,), "partial_rotary_factor": (None, 1.0)},
        written={"mlp_bias": False},
        may_miss=("num_key_value_heads", "head_dim"),
        may_scale=True,
    ).hugging_face


def _open_meta(folder: Path) -> OtherFormat:
    from torchtitan.models.llama.meta import open_meta

    return open_meta(folder)


LLAMA = replace(DECODER, shape=LlamaArgs, hugging_face=_hugging_face, other_formats={"params.json": _open_meta})
LLAMA3, LLAMA2 = replace(LLAMA, flavors=LLAMA3_FLAVORS), replace(LLAMA, flavors=LLAMA2_FLAVORS)
