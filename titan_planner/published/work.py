"""The model of a published run, from the names and numbers that its row gives; no torch."""

import dataclasses
from dataclasses import replace
from typing import Any

from titan_planner.published.keys import Keys
from titan_planner.published.megatron import Kernels, Shape, work
from torchtitan.models.families import find_spec
from torchtitan.models.operations import Share, Work
from torchtitan.models.spec import ModelSpec
from torchtitan.refusal import Refusal

# All names of a key of a shape, and the field that a family's shape has for it.
NAMES = {
    "hidden": "hidden dim hidden_size d_model",
    "feedforward": "feedforward hidden_dim ffn_hidden ffn_hidden_size intermediate_size",
    "heads": "heads n_heads num_heads",
    "kv_heads": "kv_heads n_kv_heads num_kv_heads query_groups num_query_groups",
    "head_dim": "head_dim head_size",
    "layers": "layers n_layers num_layers",
    "vocab_size": "vocab_size vocabulary",
    "tied": "tied_embeddings tied",
    "fused_attention": "fused_attention flash_attention",
    "gated": "gated swiglu",
}
_FIELDS = {"hidden": "dim", "feedforward": "hidden_dim", "heads": "n_heads", "kv_heads": "n_kv_heads"}
_FIELDS |= {"layers": "n_layers", "vocab_size": "vocab_size", "head_dim": "head_dim", "tied": "tied_embeddings"}
_EXPERTS = ("experts", "num_experts", "n_experts", "expert_num", "expert_parallel", "ep")


def read_work(keys: Keys, share: Share, by_megatron: bool) -> Work:
    """A family of this recipe, or a shape; computed as this recipe does, or as Megatron-LM does."""
    experts = next((key for key in _EXPERTS if keys.find(key, 1) not in (0, 1)), None)
    family, flavor = keys.find("model"), str(keys.find("flavor", ""))
    if experts and (by_megatron or not isinstance(family, str)):
        raise keys.refusal(
            f"has {experts} = {keys.find(experts)}",
            "a mixture of experts is predicted as a family of this recipe computes it: give model and flavor",
        )
    if not isinstance(family, str):
        return work(*_shape(keys, share, None, by_megatron), share)
    try:
        spec = find_spec(family)
    except Refusal as error:
        raise keys.refusal(f"has model = {family!r}", f"give a shape and the nearest family; {error}") from None
    if isinstance(spec, ModelSpec) or spec.operations is None:
        raise keys.refusal(f"has model = {family!r}, which does not say what it computes", "give its spec operations")
    said = {field: keys.find(key) for key, field in _FIELDS.items() if keys.find(key) is not None}
    needed = {field.name for field in dataclasses.fields(spec.shape) if field.default is dataclasses.MISSING}
    if flavor not in spec.flavors and not needed <= set(said):
        lacking = ", ".join(sorted(needed - set(said)))
        raise keys.refusal(f"has flavor = {flavor!r}", f"use one of {', '.join(spec.flavors)}, or give {lacking}")
    args = replace(spec.flavors[flavor], **said) if flavor in spec.flavors else spec.shape(**said)
    return work(*_shape(keys, share, args, by_megatron), share) if by_megatron else spec.operations(args, share)


def _shape(keys: Keys, share: Share, args: Any, by_megatron: bool) -> tuple[Shape, Kernels]:
    """What a row does not say is a GPT's; of a model with a gate or shared keys and values, what is usual for those."""

    def known(key: str, default: Any = None) -> Any:
        return default if args is None else getattr(args, _FIELDS[key]) or default

    hidden, heads = (keys.number(key, known(key)) for key in ("hidden", "heads"))
    kv_heads = keys.number("kv_heads", known("kv_heads", heads))
    gated = keys.flag("gated", args is not None or kv_heads < heads)
    shape = Shape(
        hidden,
        keys.number("feedforward", known("feedforward", None if gated else 4 * hidden)),
        heads,
        kv_heads,
        keys.number("head_dim", known("head_dim", hidden / heads)),
        keys.number("layers", known("layers")),
        keys.number("vocab_size", known("vocab_size")),
        gated,
        keys.flag("tied", known("tied", False) if args else not gated),
    )
    split = keys.flag("sequence_parallel", share.tp > 1)
    kernels = Kernels(
        keys.flag("fused_attention", gated),
        split,
        keys.flag("gathers_again_in_backward", split),
        keys.flag("dropout", not gated),
        keys.flag("fused_loss", not by_megatron),
    )
    return shape, kernels
