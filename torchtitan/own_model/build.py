"""Builds this rank's part of a user's module: whole on the host, cut into stages, sharded, filled with its values."""

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

from torchtitan.config.schema import Config
from torchtitan.models.own import OwnBlueprint, Structure
from torchtitan.models.spec import Part
from torchtitan.models.stages import V_SHAPED, StagePlan, plan_microbatches
from torchtitan.observe.log import logger
from torchtitan.own_model.cut import Cut, become_stage, divide, record, shapes
from torchtitan.own_model.derive import part_of
from torchtitan.own_model.samples import own_draws
from torchtitan.parallel.loss_scale import LossScale
from torchtitan.parallel.mesh import Mesh
from torchtitan.parallel.parts import ModelParts
from torchtitan.refusal import Refusal
from torchtitan.training.parallelize import apply_parallelism
from torchtitan.weights.tensors import copy_part


@dataclass(frozen=True)
class OwnParts(ModelParts):
    """With the buffers that are saved, and with what travels between the stages."""

    structure: Structure | None = None
    output: Any = None  # how the last stage's tensors make up the model's output
    arriving: tuple[list[Tensor], ...] = ()  # what comes in at each stage, and after the last what it returns

    def saved_parameters(self) -> dict[str, Any]:
        """Parameters, and the buffers that are persistent or that forward changes."""
        known, saved = self.structure, dict[str, Any](super().saved_parameters())
        assert known is not None
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
        copy_part(parameter, values[name].__getitem__)
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
        here = [(owner, leaf) for owner, leaf in owners if owner is not None]
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
    _share(model, (*known.shared, *known.shared_buffers))
    cast_parameters(model, config.training.dtype)
    names = [name for name, _ in model.named_modules()]
    stages: Mapping[int, nn.Module] = {0: model}
    ranks: tuple[int, ...] = (0,)
    output, arriving = None, cast(tuple[list[Tensor], ...], ())
    if mesh.dims.pp > 1:
        plan, stages, output, arriving = _cut(config, blueprint, mesh, model)
        ranks = plan.ranks
    for stage in stages.values():
        apply_parallelism(stage.train(), blueprint, mesh, config, names, is_sharded(config, mesh))
    scale = LossScale(device) if config.training.mixed_precision_param == "float16" else None
    axis = mesh.devices["pp"]
    return OwnParts(stages, ranks, axis, 0, 0, None, scale, known, output, arriving)


def cast_parameters(model: nn.Module, dtype: str) -> None:
    """Buffers keep their types: a running mean needs its digits."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(getattr(torch, dtype))


def _cut(
    config: Config, blueprint: OwnBlueprint, mesh: Mesh, model: nn.Module
) -> tuple[StagePlan, dict[int, nn.Module], Any, tuple[list[Tensor], ...]]:
    """The plan, this rank's stages, and what OwnParts holds of all stages."""
    known, parallelism = blueprint.known, config.parallelism
    ways = {training: record(model.train(training), known.parts, known.inputs) for training in (True, False)}
    count = num_stages(parallelism.pipeline_parallel_schedule, mesh.dims.pp)
    stages = divide(known.parts, ways[True], count, parallelism.pipeline_parallel_layer_counts)
    plan = plan_ranks(stages, parallelism.pipeline_parallel_schedule, mesh.dims.pp)
    plan_microbatches(parallelism, plan, config.training.local_batch_size)
    _check_shared(known, stages)
    constant = {name for name, _ in model.named_buffers(remove_duplicate=False)} - known.changing
    cuts = {training: Cut(graph, [stage[0].name for stage in stages], constant) for training, graph in ways.items()}
    if mesh.devices.get_rank() == 0:
        logger.info("pipeline: " + " | ".join(", ".join(part.name for part in stage) for stage in stages))
    typed = copy.deepcopy(model)
    cast_parameters(typed, config.training.mixed_precision_param)
    size = parallelism.pipeline_parallel_microbatch_size
    arriving = tuple(shapes(typed, ways[True], cuts[True], known.example, known.inputs.names, size))
    own, output = {}, None
    for number in plan.of_rank(mesh.devices["pp"].get_local_rank()):
        own[number] = copy.deepcopy(model)
        output = become_stage(own[number], cuts, number)
    return plan, own, output, arriving


def _check_shared(known: Structure, stages: list[list[Part]]) -> None:
    """Refuse a tensor with two names that two stages would change, each for itself."""

    def stage_of(name: str) -> int | None:
        return next((n for n, stage in enumerate(stages) if part_of(name, [part.name for part in stage])), None)

    changing = [names for names in known.shared_buffers if known.changing.intersection(names)]
    for kind, groups in (("weight", known.shared), ("buffer that forward changes", changing)):
        for names in groups:
            if len({stage_of(name) for name in names}) > 1 or stage_of(names[0]) is None:
                raise Refusal(
                    f"the model shares one {kind} as {' and '.join(names)}, which pipeline stages of a model of one's "
                    "own cannot; use parallelism.pipeline_parallel_degree = 1"
                )


def num_stages(schedule: str, degree: int) -> int:
    return degree if issubclass(get_schedule_class(schedule), PipelineScheduleSingle) else 2 * degree


def plan_ranks(stages: list[list[Part]], schedule: str, degree: int) -> StagePlan:
    numbers = range(len(stages))
    ranks = [min(s, 2 * degree - 1 - s) if schedule in V_SHAPED else s % degree for s in numbers]
    return StagePlan(tuple(map(tuple, stages)), tuple(ranks))
