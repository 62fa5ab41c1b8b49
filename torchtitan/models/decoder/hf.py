"""A decoder in Hugging Face's files: the names of its weights, and its config.json; no torch."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torchtitan.config.schema import RopeScaling
from torchtitan.models.decoder.args import DecoderArgs
from torchtitan.models.spec import HuggingFace
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
SIZES = {
    "hidden_size": "dim",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "num_key_value_heads": "n_kv_heads",
    "intermediate_size": "hidden_dim",
    "vocab_size": "vocab_size",
    "head_dim": "head_dim",
}
# Values of keys that config.json leaves out, as transformers' configuration classes have them.
_ABSENT = {"rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": False}
_SCALING = {
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_position_embeddings": "original_max_seq_len",
}


@dataclass(frozen=True)
class DecoderFiles:
    """What is a family's own in these files."""

    name: str  # as in Qwen3ForCausalLM
    shape: type[DecoderArgs]
    absent: Mapping[str, Any]  # transformers' values of keys that its config.json leaves out, where they are its own
    block: Mapping[str, str] = field(default_factory=dict)  # names of modules that only this family's layers have
    fixed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)  # its keys that may have only these values here
    written: Mapping[str, Any] = field(default_factory=dict)  # its keys that say no size
    may_miss: tuple[str, ...] = ()  # its keys of sizes that it may leave out
    may_scale: bool = False  # the rotation, as Llama 3.1 does
    model_type: str = ""  # where it is not the name in small letters

    @property
    def hugging_face(self) -> HuggingFace:
        return HuggingFace(self._type, self.to_name, self.to_config, self.from_config)

    @property
    def _type(self) -> str:
        return self.model_type or self.name.lower()

    @property
    def size_names(self) -> Mapping[str, str]:
        """The family's keys of sizes, and the shape's fields that they are."""
        return SIZES

    @property
    def block_names(self) -> Mapping[str, str]:
        """Modules of a layer, and the family's names for them."""
        return {**_BLOCK, **self.block}

    def to_name(self, name: str) -> str:
        """`layers.0.attention.wq.weight` -> `model.layers.0.self_attn.q_proj.weight`."""
        module = name.removesuffix(".weight")
        block = re.fullmatch(r"layers\.(\d+)\.(.+)", module)
        renamed = self.block_names.get(block[2]) if block else _OUTER.get(module)
        if renamed is None:
            raise Refusal(f"{name} has no name in Hugging Face's {self.name}; give it one in models/decoder/hf.py")
        return f"model.layers.{block[1]}.{renamed}.weight" if block else f"{renamed}.weight"

    def to_config(self, args: DecoderArgs, dtype: str, bos_id: int | None, eos_id: int) -> dict[str, Any]:
        """config.json, in the form that transformers 4 and 5 and others read."""
        scaling = args.rope_scaling and {theirs: getattr(args.rope_scaling, ours) for theirs, ours in _SCALING.items()}
        return {
            "architectures": [f"{self.name}ForCausalLM"],
            "model_type": self._type,
            **{theirs: getattr(args, ours) for theirs, ours in self.size_names.items()},
            "head_dim": args.head_size,
            "rms_norm_eps": args.norm_eps,
            "rope_theta": args.rope_theta,
            "rope_scaling": scaling and {"rope_type": "llama3", **scaling},
            "tie_word_embeddings": args.tied_embeddings,
            "max_position_embeddings": args.max_seq_len,
            "hidden_act": "silu",
            "attention_bias": False,
            **self.written,
            "bos_token_id": bos_id,
            "eos_token_id": eos_id,
            "torch_dtype": dtype,
        }

    def from_config(self, config: dict[str, Any]) -> DecoderArgs:
        """The shape config.json describes; what this model cannot be is refused, all of it at once."""
        config = {**_ABSENT, **self.absent, **config}
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        kind = rope.get("rope_type", rope.get("type", "default"))
        if refused := self._refused(config, kind, rope):
            raise Refusal(f"config.json describes no model that {self.name} can be here: {'; '.join(refused)}")
        said: dict[str, Any] = {ours: config.get(theirs) for theirs, ours in self.size_names.items()}
        said["n_kv_heads"] = said["n_kv_heads"] or said["n_heads"]
        if "head_dim" in self.may_miss and said["head_dim"] == said["dim"] // said["n_heads"]:
            del said["head_dim"]
        if kind == "llama3":
            said["rope_scaling"] = RopeScaling(**{ours: rope[theirs] for theirs, ours in _SCALING.items()})
        return self.shape(
            **said,
            norm_eps=config["rms_norm_eps"],
            rope_theta=float(rope.get("rope_theta", config["rope_theta"])),
            tied_embeddings=config["tie_word_embeddings"],
            max_seq_len=config["max_position_embeddings"],
        )

    def _refused(self, config: dict[str, Any], kind: str, rope: Mapping[str, Any]) -> list[str]:
        fixed: Mapping[str, tuple[Any, ...]] = {
            "model_type": (self._type,),
            "hidden_act": ("silu",),
            "attention_bias": (False,),
            "attention_dropout": (None, 0.0),
            "quantization_config": (None,),
            **self.fixed,
        }
        refused = [
            f"{key} = {config[key]!r}, must be {allowed[-1]!r}"
            for key, allowed in fixed.items()
            if key in config and config[key] not in allowed
        ]
        refused += [f"no {key}" for key in self.size_names if key not in self.may_miss and config.get(key) is None]
        if others := sorted(set(config.get("layer_types") or []) - {"full_attention"}):
            refused.append(f"layers of the type {others[0]!r}, only 'full_attention'")
        kinds = ("default", "llama3") if self.may_scale else ("default",)
        if kind not in kinds:
            refused.append(f"rotation of the type {kind!r}, only {' and '.join(map(repr, kinds))}")
        elif kind == "llama3":
            for key in _SCALING:
                value: Any = rope.get(key)
                is_whole = key == "original_max_position_embeddings"
                is_number = isinstance(value, int if is_whole else (int, float)) and not isinstance(value, bool)
                if not is_number or not 0 < value < math.inf:
                    must = f"must be a {'whole ' * is_whole}number above 0, as the publisher's config.json has"
                    refused.append(f"{key} = {value!r} in its rotation 'llama3', {must}")
        return refused
