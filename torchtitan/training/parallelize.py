"""Applies the mesh to any model, in this order: TP, CP, recompute, compile each layer, shard.

The family's spec contributes the plan of tensor parallelism and the parts.
"""

from collections.abc import Collection, Sequence

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from torchtitan.config.schema import Config
from torchtitan.models.layers import exchange_attention
from torchtitan.models.spec import Blueprint, Part
from torchtitan.parallel.mesh import Mesh
from torchtitan.parallel.parts import CastWeights, tie


def keep_parts(model: nn.Module, parts: Sequence[Part], kept: Sequence[Part]) -> None:
    """Turn the whole model into the pipeline stage that holds some of its parts; the others become None."""
    for part in parts:
        if part not in kept:
            parent, _, leaf = part.name.rpartition(".")
            holder = model.get_submodule(parent)
            if isinstance(holder, nn.ModuleDict):
                del holder[leaf]
            else:
                setattr(holder, leaf, None)


def apply_parallelism(
    model: nn.Module,
    blueprint: Blueprint,
    mesh: Mesh,
    config: Config,
    names: Collection[str],
    shards: bool = True,
) -> CastWeights | None:
    """Turn a model, or a stage of one, on the meta device into this rank's part of it.

    `names` are those of all modules of the whole model. A rank that shares the weights with nobody gets their casts.
    """
    parallelism, compile_ = config.parallelism, config.compile
    if mesh.experts is not None:
        from torchtitan.experts.divide import divide_experts

        divide_experts(model, mesh.experts["ep"])
    if mesh.dims.tp > 1:
        from torchtitan.parallel.tensor import overlap_communication, report_split, split_tensors

        # Of inputs other than text it is not known which axis is the sequence, if any.
        loss_parallel = blueprint.reads_text and not parallelism.disable_loss_parallel
        axis = mesh.devices["tp"]
        split_tensors(model, blueprint, axis, loss_parallel, names, split_sequence=blueprint.reads_text)
        report_split(model, axis, is_whole=mesh.dims.pp == 1)
        if parallelism.enable_async_tensor_parallel:
            overlap_communication(axis)
    if blueprint.reads_text and config.model.attn_mask_type == "block_causal":
        from torchtitan.parallel.documents.attention import document_attention_for

        dtype = getattr(torch, config.training.mixed_precision_param)
        exchange_attention(model, document_attention_for(mesh, dtype, blueprint.shape.head_size))
    elif mesh.dims.cp > 1:
        from torchtitan.parallel.context import GatheredAttention

        exchange_attention(model, lambda _: GatheredAttention(mesh.devices["cp"]))
    elif compile_.model and mesh.devices.device_type == "cpu":
        from torchtitan.parallel.cpu_attention import AttentionByProducts

        exchange_attention(model, AttentionByProducts)
    in_one = not blueprint.num_experts  # piece a layer is compiled
    if config.activation_checkpoint.mode != "none" or compile_.model:
        from torchtitan.parallel.recompute import apply_recompute

        apply_recompute(model, blueprint.layers, config.activation_checkpoint, compile_.model, in_one)
    if compile_.enable:
        from torchtitan.parallel.compiler import apply_compiler

        apply_compiler(model, blueprint.layers, mesh, compile_, not blueprint.reads_text, in_one)
    if not shards:
        return None
    if blueprint.reads_text and is_alone(mesh, config):
        dtype = getattr(torch, config.training.mixed_precision_param)
        narrow = config.optimizer.name == "AdamW" and config.optimizer.moments_dtype == "bfloat16"  # it reads any type
        return CastWeights(model, dtype, lookups(model, blueprint), narrow)
    _shard(model, blueprint, mesh, config)
    return None


def is_alone(mesh: Mesh, config: Config) -> bool:
    """Whether FSDP has nothing to do: no other rank, no weights on the host, none to cast to float8 or to free."""
    in_float8 = config.float8 is not None and config.float8.enable_fsdp_float8_all_gather
    is_asked = config.training.enable_cpu_offload or config.parallelism.fsdp_reshard_after_forward != "default"
    return mesh.devices.size() == 1 and not is_asked and not in_float8


def _shard(model: nn.Module, blueprint: Blueprint, mesh: Mesh, config: Config) -> None:
    from torchtitan.parallel.fsdp import apply_fsdp

    parallelism = config.parallelism
    reshard = parallelism.fsdp_reshard_after_forward
    if reshard == "default" and mesh.dims.pp > 1:
        reshard = "never"  # once gathered, parameters serve all microbatches
    units = sharding_units(model, blueprint)
    if blueprint.num_experts:
        from torchtitan.experts.divide import shard_experts

        shard_experts(model, mesh, config.training, reshard)
    apply_fsdp(model, units, mesh.fsdp, config.training, reshard, casts_inputs=not blueprint.reads_text)
    for module in lookups(model, blueprint):
        if isinstance(module, FSDPModule):
            module.set_unshard_in_backward(False)
            module.set_reshard_after_forward(reshard != "never")


def lookups(model: nn.Module, blueprint: Blueprint) -> list[nn.Module]:
    """The parts whose backward needs no weights."""
    modules = dict(model.named_modules())
    return [modules[part.name] for part in blueprint.parts() if part.kind == "lookup" and part.name in modules]


def sharding_units(model: nn.Module, blueprint: Blueprint) -> list[list[nn.Module]]:
    """The modules that FSDP gathers together: each part before the layers, each layer, and all parts after them.

    A tied weight stays with the root, which is gathered throughout.
    """
    modules = dict(model.named_modules())
    parts = blueprint.parts()
    is_layer = [part.kind == "layer" for part in parts]
    if True not in is_layer:
        return []
    begin, end = is_layer.index(True), len(parts) - is_layer[::-1].index(True)
    layers = [[modules[part.name]] for part in parts[begin:end] if part.name in modules]
    if tie(model, blueprint.tied):
        return layers
    before = [[modules[part.name]] for part in parts[:begin] if part.name in modules]
    after = [modules[part.name] for part in parts[end:] if part.name in modules]
    return [*before, *layers, *([after] if after else [])]
