"""Applies the mesh to any model, in this order: TP, CP, recompute, compile each layer, shard.

The family's spec contributes the plan of tensor parallelism and the parts.
"""

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from torchtitan.config.schema import Config
from torchtitan.models.layers import exchange_attention
from torchtitan.models.spec import Blueprint, Part
from torchtitan.parallel.fsdp import apply_fsdp
from torchtitan.parallel.mesh import Mesh
from torchtitan.parallel.parts import tie
from torchtitan.parallel.recompute import apply_recompute
from torchtitan.parallel.tensor import overlap_communication, wait_for_output
from torchtitan.refusal import Refusal


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


def apply_parallelism(model: nn.Module, blueprint: Blueprint, mesh: Mesh, config: Config, shards: bool = True) -> None:
    """Turn a model on the meta device into this rank's part of it."""
    parallelism, compile_ = config.parallelism, config.compile
    if mesh.dims.tp > 1:
        # Of inputs other than text it is not known which axis is the sequence, if any.
        loss_parallel = blueprint.reads_text and not parallelism.disable_loss_parallel
        split_tensors(model, blueprint, mesh.devices["tp"], loss_parallel, split_sequence=blueprint.reads_text)
    if parallelism.enable_async_tensor_parallel:
        overlap_communication(mesh.devices["tp"])
    if mesh.dims.cp > 1:
        from torchtitan.parallel.context import GatheredAttention

        exchange_attention(model, lambda _: GatheredAttention(mesh.devices["cp"]))
    elif compile_.model and mesh.devices.device_type == "cpu":
        from torchtitan.parallel.cpu_attention import AttentionByProducts

        exchange_attention(model, AttentionByProducts)
    apply_recompute(model, blueprint.layers, config.activation_checkpoint)
    if compile_.enable and mesh.dims.tp > 1:
        # The code compiled for split tensors depends on the rank, but its cache key does not. With another rank's code
        # a second run would train wrongly: https://github.com/pytorch/pytorch/issues/188390
        torch.compiler.config.cache_key_tag = f"rank {mesh.devices.get_rank()}"
    modules = dict(model.named_modules())
    if compile_.model:
        for name in blueprint.layers:
            if name in modules:
                modules[name].compile(backend=compile_.backend, fullgraph=True)
    if not shards:
        return
    reshard = parallelism.fsdp_reshard_after_forward
    if reshard == "default" and mesh.dims.pp > 1:
        reshard = "never"  # once gathered, parameters serve all microbatches
    units = sharding_units(model, blueprint)
    apply_fsdp(model, units, mesh.fsdp, config.training, reshard)
    for part in blueprint.parts():
        module = modules.get(part.name)
        if part.kind == "lookup" and isinstance(module, FSDPModule):  # backward of a lookup needs no weights
            module.set_unshard_in_backward(False)
            module.set_reshard_after_forward(reshard != "never")


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


def split_tensors(
    model: nn.Module, blueprint: Blueprint, axis: DeviceMesh, loss_parallel: bool, split_sequence: bool = True
) -> None:
    """Share the model's weights over the axis by its family's plan.

    Between layers, activations are split along the sequence; generation gives single tokens, which cannot be.
    """
    assert blueprint.spec.tensor_plan is not None, "models/rules.py refuses tensor parallelism without a plan"
    plan = blueprint.spec.tensor_plan(blueprint.shape, split_sequence, loss_parallel)
    modules = dict(model.named_modules())
    of_layers = {name.partition(".*.")[2]: style for name, style in plan.items() if ".*." in name}
    ends = {name: style for name, style in plan.items() if name in modules}
    for layer in [modules[name] for name in blueprint.layers if name in modules]:
        own = of_layers
        if axis.device_type != "cpu":  # gloo carries no float8: on CPUs activations travel in their own type
            from torchtitan.parallel.float8 import float8_plan

            own = float8_plan(layer, of_layers)
        parallelize_module(layer, axis, own)
    parallelize_module(model, axis, ends)
    for name in ends:
        wait_for_output(modules[name])
    tie(model, blueprint.tied)  # both were split by rows, but as separate parameters
    left_out = [name for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor)]
    if split_sequence and left_out:
        raise Refusal(
            f"parallelism.tensor_parallel_degree = {axis.size()}, but nothing says how ranks share {left_out[0]}: each "
            f"would train it on its part of the sequence alone; give it a style in the family's tensor_plan, or use 1"
        )
