"""Builds this rank's part of a user's module: whole on the host, cut into stages, sharded, filled with its values."""

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from torchtitan.config.schema import Config
from torchtitan.lora.adapter import Adapter
from torchtitan.lora.layers import attach, cast_frozen
from torchtitan.models.own import OwnBlueprint, Structure
from torchtitan.models.pipeline_rules import plan_microbatches
from torchtitan.models.spec import ModelSpec
from torchtitan.models.stages import BACKWARD_IN_TWO_PARTS, StagePlan, place_stages, stages_a_rank
from torchtitan.observe.log import logger
from torchtitan.own_model.cut import Cut, Stage, cut_ways, divide, place_weights
from torchtitan.own_model.derive import build_module, candidates_of
from torchtitan.own_model.samples import own_draws
from torchtitan.parallel.loss_scale import LossScale
from torchtitan.parallel.mesh import Mesh
from torchtitan.parallel.parts import ModelParts, copy_part
from torchtitan.parallel.tied import TiedWeight
from torchtitan.refusal import Refusal
from torchtitan.training.parallelize import apply_parallelism


@dataclass(frozen=True)
class OwnParts(ModelParts):
    """With the buffers that are saved, and with what travels between the stages."""

    structure: Structure | None = None
    cuts: Mapping[bool, Cut] = field(default_factory=dict)  # of forward in training, and in validation

    def saved_parameters(self) -> dict[str, Any]:
        """What checkpoints hold; beside an adapter, a frozen base is not in them."""
        named = self.named_tensors()
        return named if self.adapter is None else self.adapter.without_base(named)

    def named_tensors(self) -> dict[str, Any]:
        """Parameters, and the buffers that are persistent or that forward changes."""
        known = self.structure
        assert known is not None
        saved: dict[str, Any] = {known.saved_name(name): p for name, p in super().saved_parameters().items()}
        for name, holder, leaf in self.buffers():
            if leaf not in holder._non_persistent_buffers_set or name in known.changing:
                saved[known.saved_name(name)] = holder._buffers[leaf]
        return saved

    def buffers(self) -> Iterator[tuple[str, nn.Module, str]]:
        """Every place that holds a buffer: its name in the model, the module, and its name there."""
        for stage in self.stages.values():
            for prefix, holder in stage.named_modules(remove_duplicate=False):
                for leaf, buffer in holder._buffers.items():
                    if buffer is not None:
                        yield f"{prefix}.{leaf}".lstrip("."), holder, leaf


def build(config: Config, blueprint: OwnBlueprint, mesh: Mesh, device: torch.device, seed: int) -> OwnParts:
    """With the values that the module gives itself under this seed, which do not depend on the layout."""
    with own_draws(str(seed)):
        torch.manual_seed(seed)  # the numbers that a user's own script would draw
        whole = blueprint.spec.build()
    named = *whole.named_parameters(), *whole.named_buffers(remove_duplicate=False)
    values = {name: value.detach().clone() for name, value in named}
    model = lay_out(config, blueprint, mesh, device, whole)
    for stage in model.stages.values():
        stage.to_empty(device="cpu" if config.training.enable_cpu_offload else device)
        _share(stage, blueprint.known.shared)
    for name, parameter in model.named_parameters():
        copy_part(parameter, values[blueprint.known.saved_name(name)].__getitem__)
    ours: dict[str, Tensor] = {}
    for name, holder, leaf in model.buffers():  # on the device, also where parameters are kept on the host
        first = blueprint.known.saved_name(name)
        ours[first] = ours.get(first, values[name].to(device))
        setattr(holder, leaf, ours[first])
    return model


def _share(model: nn.Module, shared: tuple[tuple[str, ...], ...]) -> None:
    """One parameter or buffer under all its names again: a move to another device parts them."""
    modules = dict(model.named_modules(remove_duplicate=False))
    for names in shared:
        owners = [(modules.get(owner), leaf) for owner, _, leaf in (name.rpartition(".") for name in names)]
        here = [(owner, leaf) for owner, leaf in owners if owner is not None and hasattr(owner, leaf)]
        for owner, leaf in here[1:]:
            setattr(owner, leaf, getattr(*here[0]))


def is_sharded(config: Config, mesh: Mesh) -> bool:
    """Whether FSDP holds the parameters; where it has nothing to do, it would only take time."""
    training = config.training
    is_alone = mesh.fsdp.size() == 1 and training.dtype == training.mixed_precision_param
    return not is_alone or training.enable_cpu_offload


def lay_out(config: Config, blueprint: OwnBlueprint, mesh: Mesh, device: torch.device, whole: nn.Module) -> OwnParts:
    """This rank's part of the module under its layout, on the meta device."""
    model, known = whole.to("meta"), blueprint.known
    scale = LossScale(device) if config.training.mixed_precision_param == "float16" else None
    config = known.held(config)
    if known.tensor_words:
        from torchtitan.own_model.tensor_plan import styles_of

        spec = replace(blueprint.spec, tensor_plan=lambda *_: styles_of(known.tensor_words))
        blueprint = replace(blueprint, spec=spec)
    _share(model, (*known.shared, *known.shared_buffers))
    cast_parameters(model, config.training.dtype)
    cast_frozen(model, config)
    names = [name for name, _ in model.named_modules()]
    plan, stages, ties, cuts = _stages(config, known, mesh, model)
    for stage in stages.values():
        apply_parallelism(stage.train(), blueprint, mesh, config, names, is_sharded(config, mesh))
        if isinstance(stage.forward, Stage):
            stage.forward.listen()
    adapter = None if config.lora.rank is None else Adapter(config.lora)
    return OwnParts(stages, plan.ranks, mesh.devices["pp"], 0, 0, ties, scale, adapter, structure=known, cuts=cuts)


def build_part(spec: ModelSpec, config: Config) -> nn.Module:
    """The user's module with adapters, or with all but some weights frozen."""
    model = build_module(spec.build)
    blocks = [name for name, _ in candidates_of(model, spec.layers) if name.rpartition(".")[0] == spec.layers]
    attach(model, config, blocks)
    return model


def cast_parameters(model: nn.Module, dtype: str) -> None:
    """Buffers keep their types: a running mean needs its digits."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(getattr(torch, dtype))


def _stages(
    config: Config, known: Structure, mesh: Mesh, model: nn.Module
) -> tuple[StagePlan, dict[int, nn.Module], list[TiedWeight], dict[bool, Cut]]:
    """This rank's stages, the weights that several share, and the cuts; without a pipeline the model is one stage."""
    if mesh.dims.pp == 1:
        return StagePlan((known.parts,), (0,)), {0: model}, [], {}
    plan = plan_stages(config, known, mesh.dims.pp)
    plan_microbatches(config.parallelism, plan, config.training.local_batch_size)
    cuts = cut_ways(known, plan.stages)
    _check_backward(config.parallelism.pipeline_parallel_schedule, cuts[True])
    away, ties = place_weights(model, known, plan.stages, cuts)
    if mesh.devices.get_rank() == 0:
        logger.info("pipeline: " + " | ".join(", ".join(part.name for part in stage) for stage in plan.stages))
    own = {}
    for number in plan.of_rank(mesh.devices["pp"].get_local_rank()):
        own[number] = copy.deepcopy(model)
        stage = Stage(own[number], cuts, number, known.example)
        for name in away[number]:
            stage.take_away(name, getattr(torch, config.training.mixed_precision_param))
    axis = mesh.devices["pp"]
    return plan, own, [TiedWeight(names, numbers, own, plan.ranks, axis) for names, numbers in ties], cuts


def _check_backward(schedule: str, cut: Cut) -> None:
    """torch 2.13's backward in two parts loses the gradients of a stage whose inputs have none."""
    for number in range(1, cut.last + 1) if schedule in BACKWARD_IN_TWO_PARTS else ():
        arriving = [cut.way.forms[value].requires_grad for value in cut.arriving[number]]
        if True not in arriving:
            raise Refusal(
                f'parallelism.pipeline_parallel_schedule = "{schedule}" computes the gradients of inputs before those '
                f"of weights, and all weights before stage {number} are frozen, so that its inputs have none and torch "
                'would lose those of its weights; use "1F1B" or "Interleaved1F1B"'
            )


def plan_stages(config: Config, known: Structure, degree: int) -> StagePlan:
    schedule, counts = config.parallelism.pipeline_parallel_schedule, config.parallelism.pipeline_parallel_layer_counts
    count = degree * stages_a_rank(schedule)
    stages = divide([*known.parts, *known.rest], known.ways[True], count, counts)
    return StagePlan(tuple(map(tuple, stages)), tuple(place_stages(count, schedule, degree)))
