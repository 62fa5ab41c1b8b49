"""Hugging Face's names of a Llama's weights, and its config.json; no torch."""

import re
from typing import Any

from torchtitan.config.schema import RopeScaling
from torchtitan.models.llama.args import LlamaArgs
from torchtitan.refusal import Refusal

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
# Keys of config.json that may have only these values here.
_FIXED: dict[str, tuple[Any, ...]] = {
    "model_type": ("llama",),
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "sliding_window": (None,),
    "partial_rotary_factor": (None, 1.0),
    "quantization_config": (None,),
}


def to_hf_name(name: str) -> str:
    """`layers.0.attention.wq.weight` -> `model.layers.0.self_attn.q_proj.weight`."""
    module = name.removesuffix(".weight")
    block = re.fullmatch(r"layers\.(\d+)\.(.+)", module)
    renamed = _BLOCK.get(block[2]) if block else _OUTER.get(module)
    if renamed is None:
        raise Refusal(f"{name} has no name in Hugging Face's Llama; give it one in models/llama/hf.py")
    return f"model.layers.{block[1]}.{renamed}.weight" if block else f"{renamed}.weight"


def to_hf_config(args: LlamaArgs, dtype: str, bos_id: int | None, eos_id: int) -> dict[str, Any]:
    """config.json, in the form that transformers 4 and 5 and others read."""
    scaling = None
    if args.rope_scaling is not None:
        scaling = {
            "rope_type": "llama3",
            "factor": args.rope_scaling.factor,
            "low_freq_factor": args.rope_scaling.low_freq_factor,
            "high_freq_factor": args.rope_scaling.high_freq_factor,
            "original_max_position_embeddings": args.rope_scaling.original_max_seq_len,
        }
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": args.dim,
        "num_hidden_layers": args.n_layers,
        "num_attention_heads": args.n_heads,
        "num_key_value_heads": args.n_kv_heads,
        "head_dim": args.head_size,
        "intermediate_size": args.hidden_dim,
        "vocab_size": args.vocab_size,
        "rms_norm_eps": args.norm_eps,
        "rope_theta": args.rope_theta,
        "rope_scaling": scaling,
        "tie_word_embeddings": args.tied_embeddings,
        "max_position_embeddings": args.max_seq_len,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": bos_id,
        "eos_token_id": eos_id,
        "torch_dtype": dtype,
    }


def from_hf_config(config: dict[str, Any]) -> LlamaArgs:
    """The shape config.json describes; what this model cannot be is refused, all of it at once."""
    refused = [
        f"{key} = {config[key]!r}, must be {allowed[-1]!r}"
        for key, allowed in _FIXED.items()
        if key in config and config[key] not in allowed
    ]
    needed = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
    refused += [f"no {key}" for key in needed if key not in config]
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "llama3"):
        refused.append(f"rotation of the type {kind!r}, only 'default' and 'llama3'")
    if refused:
        raise Refusal(f"config.json describes no model that Transformer can be: {'; '.join(refused)}")
    scaling = None
    if kind == "llama3":
        scaling = RopeScaling(
            factor=rope["factor"],
            low_freq_factor=rope["low_freq_factor"],
            high_freq_factor=rope["high_freq_factor"],
            original_max_seq_len=rope["original_max_position_embeddings"],
        )
    head_dim = config.get("head_dim")
    # Where a key is missing, transformers' default holds.
    return LlamaArgs(
        dim=config["hidden_size"],
        n_layers=config["num_hidden_layers"],
        n_heads=config["num_attention_heads"],
        n_kv_heads=config.get("num_key_value_heads") or config["num_attention_heads"],
        hidden_dim=config["intermediate_size"],
        vocab_size=config["vocab_size"],
        head_dim=None if head_dim in (None, config["hidden_size"] // config["num_attention_heads"]) else head_dim,
        norm_eps=config.get("rms_norm_eps", 1e-6),
        rope_theta=float(rope.get("rope_theta", config.get("rope_theta", 10000.0))),
        rope_scaling=scaling,
        tied_embeddings=config.get("tie_word_embeddings", False),
        max_seq_len=config.get("max_position_embeddings", 2048),
    )
