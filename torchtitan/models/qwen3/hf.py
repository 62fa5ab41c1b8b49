"""Hugging Face's names of a Qwen3's weights, and its config.json; no torch."""

import re
from typing import Any

from torchtitan.models.qwen3.args import Qwen3Args
from torchtitan.refusal import Refusal

_BLOCK = {
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_OUTER = {"tok_embeddings": "model.embed_tokens", "norm": "model.norm", "output": "lm_head"}
# Keys of config.json that may have only these values here. sliding_window itself has no effect while it is not used.
_FIXED: dict[str, tuple[Any, ...]] = {
    "model_type": ("qwen3",),
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "use_sliding_window": (False,),
    "quantization_config": (None,),
}
_SHAPE = {
    "hidden_size": "dim",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "num_key_value_heads": "n_kv_heads",
    "intermediate_size": "hidden_dim",
    "vocab_size": "vocab_size",
    "head_dim": "head_dim",
}


def to_hf_name(name: str) -> str:
    """`layers.0.attention.q_norm.weight` -> `model.layers.0.self_attn.q_norm.weight`."""
    module = name.removesuffix(".weight")
    block = re.fullmatch(r"layers\.(\d+)\.(.+)", module)
    renamed = _BLOCK.get(block[2]) if block else _OUTER.get(module)
    if renamed is None:
        raise Refusal(f"{name} has no name in Hugging Face's Qwen3; give it one in models/qwen3/hf.py")
    return f"model.layers.{block[1]}.{renamed}.weight" if block else f"{renamed}.weight"


def to_hf_config(args: Qwen3Args, dtype: str, bos_id: int | None, eos_id: int) -> dict[str, Any]:
    """config.json, in the form that transformers 4 and 5 and others read."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        **{theirs: getattr(args, ours) for theirs, ours in _SHAPE.items()},
        "rms_norm_eps": args.norm_eps,
        "rope_theta": args.rope_theta,
        "rope_scaling": None,
        "tie_word_embeddings": args.tied_embeddings,
        "max_position_embeddings": args.max_seq_len,
        "hidden_act": "silu",
        "attention_bias": False,
        "use_sliding_window": False,
        "sliding_window": None,
        "bos_token_id": bos_id,
        "eos_token_id": eos_id,
        "torch_dtype": dtype,
    }


def from_hf_config(config: dict[str, Any]) -> Qwen3Args:
    """The shape config.json describes; what this model cannot be is refused, all of it at once."""
    refused = [
        f"{key} = {config[key]!r}, must be {allowed[-1]!r}"
        for key, allowed in _FIXED.items()
        if key in config and config[key] not in allowed
    ]
    refused += [f"no {key}" for key in _SHAPE if config.get(key) is None]
    if others := sorted(set(config.get("layer_types") or []) - {"full_attention"}):
        refused.append(f"layers of the type {others[0]!r}, only 'full_attention'")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        refused.append(f"rotation of the type {kind!r}, only 'default'")
    if refused:
        raise Refusal(f"config.json describes no model that Qwen3 can be here: {'; '.join(refused)}")
    # Where a key is missing, transformers' default holds.
    return Qwen3Args(
        **{ours: config[theirs] for theirs, ours in _SHAPE.items()},
        norm_eps=config.get("rms_norm_eps", 1e-6),
        rope_theta=float(rope.get("rope_theta", config.get("rope_theta", 10000.0))),
        tied_embeddings=config.get("tie_word_embeddings", False),
        max_seq_len=config.get("max_position_embeddings", 32768),
    )
