"""Builds this rank's part of a model: lays it out on the meta device, allocates memory, fills in initial values."""

import hashlib
from collections.abc import Mapping

import torch
from torch import nn

from torchtitan.config.schema import Config
from torchtitan.models.spec import Blueprint
from torchtitan.models.stages import plan_stages
from torchtitan.observe.log import logger
from torchtitan.parallel.mesh import Mesh
from torchtitan.parallel.parts import ModelParts, allocate, copy_part
from torchtitan.refusal import Refusal
from torchtitan.training.parallelize import apply_parallelism, keep_parts


def build_model(config: Config, blueprint: Blueprint, mesh: Mesh, device: torch.device, seed: int) -> ModelParts:
    """This rank's part of the model, with initial weights that depend on seed and name, not on the layout.

    Each rank draws every parameter that it has a part of, whole and one at a time, and keeps its part. Each kind of
    device has its own random generator, so another kind gives other values. Values are drawn on the device even if
    the parameters are kept on the host.
    """
    model = lay_out_model(config, blueprint, mesh)
    give_memory(model, config, device)
    draw_weights(dict(model.named_parameters()), blueprint, mesh, device, seed)
    return model


def draw_weights(
    weights: Mapping[str, nn.Parameter], blueprint: Blueprint, mesh: Mesh, device: torch.device, seed: int
) -> None:
    for name, parameter in weights.items():
        name = blueprint.leading_name(name)
        digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
        generator = torch.Generator(device).manual_seed(int.from_bytes(digest[:7], "little"))
        whole = torch.empty(parameter.shape, dtype=torch.float32, device=device)
        blueprint.spec.initialize(name, whole, blueprint.shape, generator)
        copy_part(parameter, whole.__getitem__)
    if mesh.dims.dp_replicate > 1:
        from torchtitan.parallel.fsdp import copy_first_replica

        copy_first_replica(weights.values(), mesh.devices["dp_replicate"])


def lay_out_model(config: Config, blueprint: Blueprint, mesh: Mesh) -> ModelParts:
    """This rank's part of the model under its layout, still on the meta device."""
    parts = blueprint.parts(config.training.seq_len)
    plan = plan_stages(parts, config.parallelism)
    if mesh.dims.pp > 1 and mesh.devices.get_rank() == 0:
        logger.info(f"pipeline: {plan}")
    stages, casts = {}, None
    for number in plan.of_rank(mesh.devices["pp"].get_local_rank()):
        with torch.device("meta"):
            stage = blueprint.spec.build(blueprint.shape).to(getattr(torch, config.training.dtype))
        for name, _ in () if blueprint.num_experts else stage.named_buffers():
            raise Refusal(
                f"{blueprint.name} has the buffer {name}, which nothing fills or saves: a family's `initialize` knows "
                "only parameters; compute it in forward, or bring the module without a shape (docs/recipe/any-model.md)"
            )
        if config.float8 is not None:
            from torchtitan.parallel.float8 import apply_float8

            apply_float8(stage, config.float8, compiled=config.compile.model)
        if config.lora.rank is not None:
            from torchtitan.lora.layers import cast_frozen

            cast_frozen(stage, config)
        names = [name for name, _ in stage.named_modules()]
        keep_parts(stage, parts, plan.stages[number])
        casts = apply_parallelism(stage, blueprint, mesh, config, names)
        stages[number] = stage.train()
    scale = None
    if config.training.mixed_precision_param == "float16":
        from torchtitan.parallel.loss_scale import LossScale

        scale = LossScale(torch.device(mesh.devices.device_type))
    axis, last, shape = mesh.devices["pp"], len(plan.ranks) - 1, blueprint.shape
    ties = []
    if blueprint.tied and last > 0:
        from torchtitan.parallel.tied import TiedWeight

        ties = [TiedWeight(blueprint.tied, (0, last), stages, plan.ranks, axis)]
    load = None
    if blueprint.num_experts:
        from torchtitan.experts.load import build_load

        load = build_load(stages.values(), blueprint, mesh, config, scale)
    return ModelParts(stages, plan.ranks, axis, shape.dim, shape.vocab_size, ties, scale, load=load, casts=casts)


def give_memory(model: ModelParts, config: Config, device: torch.device) -> None:
    """Allocate the parameters, without values, on the device or (`training.enable_cpu_offload`) on the host."""
    for stage in model.stages.values():
        allocate(stage, "cpu" if config.training.enable_cpu_offload else device)
    if model.load is not None:
        model.load.reset(device)
