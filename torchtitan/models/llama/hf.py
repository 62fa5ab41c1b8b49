"""Names of the same weights here and in Hugging Face's Llama; shapes and values are equal."""

import re

_BLOCK = {
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_OUTER = {"tok_embeddings": "model.embed_tokens", "norm": "model.norm", "output": "lm_head"}


def to_hf_name(name: str) -> str:
    """`layers.0.attention.wq.weight` -> `model.layers.0.self_attn.q_proj.weight`."""
    module = name.removesuffix(".weight")
    block = re.fullmatch(r"layers\.(\d+)\.(.+)", module)
    renamed = f"model.layers.{block[1]}.{_BLOCK[block[2]]}" if block else _OUTER[module]
    return f"{renamed}.weight"
