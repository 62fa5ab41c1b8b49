"""Builds this rank's part of a user's module: whole on the host, cut into stages, sharded, filled with its values."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

from torchtitan.config.schema import Config
from torchtitan.models.any.blueprint import AnyBlueprint
from torchtitan.models.any.cut import Cut, become_stage, divide, record, shapes
from torchtitan.models.spec import Part
from torchtitan.models.stages import V_SHAPED, StagePlan, plan_microbatches
from torchtitan.observe.log import logger
from torchtitan.parallel.loss_scale import LossScale
from torchtitan.parallel.mesh import Mesh
from torchtitan.parallel.parts import ModelParts
from torchtitan.refusal import Refusal
from torchtitan.training.parallelize import apply_parallelism
from torchtitan.weights.tensors import copy_part


@dataclass(frozen=True)
class AnyParts(ModelParts):
    """With the buffers that are saved, and with what travels between the stages."""

    inputs: tuple[str, ...] = ()  # the arguments of forward that the data gives
    output: Any = None  # how the last stage's tensors make up the model's output
    arriving: tuple[list[Tensor], ...] = ()  # what comes in at each stage, and after the last what it returns

    def saved_parameters(self) -> dict[str, Any]:
        saved: dict[str, Any] = dict(super().saved_parameters())
        for stage in self.stages.values():
            kept = stage.state_dict().keys()
            saved |= {name: buffer for name, buffer in stage.named_buffers() if name in kept}
        return saved


class Divisor:
    """Stands where a loss scale stands. Gradients are sums over samples until those of all ranks are counted."""

    def __init__(self, device: torch.device, loss_scale: LossScale | None) -> None:
        self.count, self.loss_scale = torch.ones((), device=device), loss_scale

    @property
    def factor(self) -> Tensor:
        return self.count if self.loss_scale is None else self.count * self.loss_scale.factor

    def scaled(self, loss: Tensor) -> Tensor:
        return loss if self.loss_scale is None else loss * self.loss_scale.factor

    def unscale(self, norm: Tensor) -> Tensor:
        return norm / self.factor.to(norm.device)

    def adapt(self, norm: Tensor) -> None:
        if self.loss_scale is not None:
            self.loss_scale.adapt(norm)

    def state(self) -> list[float]:
        return [] if self.loss_scale is None else self.loss_scale.state()

    def load(self, state: list[float]) -> None:
        if self.loss_scale is not None and state:
            self.loss_scale.load(state)


def build(config: Config, blueprint: AnyBlueprint, mesh: Mesh, device: torch.device, seed: int) -> AnyParts:
    """With the values that the module gives itself under this seed, which do not depend on the layout."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        whole = blueprint.spec.build()
    values = {name: value.detach().clone() for name, value in (*whole.named_parameters(), *whole.named_buffers())}
    model = lay_out(config, blueprint, mesh, device, whole)
    for stage in model.stages.values():
        stage.to_empty(device="cpu" if config.training.enable_cpu_offload else device)
        _share(stage, blueprint.known.shared)
    for name, parameter in model.named_parameters():
        copy_part(parameter, values[name].__getitem__)
    for stage in model.stages.values():
        for name, buffer in stage.named_buffers():
            buffer.copy_(values[name.replace("_checkpoint_wrapped_module.", "")])
    return model


def _share(model: nn.Module, shared: tuple[tuple[str, ...], ...]) -> None:
    """One parameter under all its names again: a move to another device parts them."""
    for first, *others in shared:
        for name in others:
            owner, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, model.get_parameter(first))


def lay_out(config: Config, blueprint: AnyBlueprint, mesh: Mesh, device: torch.device, whole: nn.Module) -> AnyParts:
    """This rank's part of the module under its layout, on the meta device."""
    model, shared = whole.to("meta"), blueprint.known.shared
    _share(model, shared)
    stages: Mapping[int, nn.Module] = {0: model}
    ranks: tuple[int, ...] = (0,)
    output, arriving = None, cast(tuple[list[Tensor], ...], ())
    if mesh.dims.pp > 1:
        if shared:
            raise Refusal(
                f"the model shares one weight as {' and '.join(shared[0])}, which pipeline stages of a model of one's "
                "own cannot; use parallelism.pipeline_parallel_degree = 1"
            )
        plan, stages, output, arriving = _cut(config, blueprint, mesh, model)
        ranks = plan.ranks
    training = config.training
    is_alone = mesh.fsdp.size() == 1 and training.dtype == training.mixed_precision_param  # FSDP would only take time
    for stage in stages.values():
        apply_parallelism(stage.train(), blueprint, mesh, config, not is_alone or training.enable_cpu_offload)
    is_float16 = training.mixed_precision_param == "float16"
    scale: Any = Divisor(device, LossScale(device) if is_float16 else None)
    return AnyParts(
        stages, ranks, mesh.devices["pp"], 0, 0, None, scale, blueprint.known.inputs.names, output, arriving
    )


def _cut(
    config: Config, blueprint: AnyBlueprint, mesh: Mesh, model: nn.Module
) -> tuple[StagePlan, dict[int, nn.Module], Any, tuple[list[Tensor], ...]]:
    """The plan, this rank's stages, and what AnyParts holds of all stages."""
    known, parallelism = blueprint.known, config.parallelism
    ways = {training: record(model.train(training), known.parts, known.inputs) for training in (True, False)}
    count = num_stages(parallelism.pipeline_parallel_schedule, mesh.dims.pp)
    stages = divide(known.parts, ways[True], count, parallelism.pipeline_parallel_layer_counts)
    plan = plan_ranks(stages, parallelism.pipeline_parallel_schedule, mesh.dims.pp)
    plan_microbatches(parallelism, plan, config.training.local_batch_size)
    cuts = {training: Cut(graph, [stage[0].name for stage in stages]) for training, graph in ways.items()}
    if mesh.devices.get_rank() == 0:
        logger.info("pipeline: " + " | ".join(", ".join(part.name for part in stage) for stage in stages))
    typed = copy.deepcopy(model).to(getattr(torch, config.training.mixed_precision_param))
    size = parallelism.pipeline_parallel_microbatch_size
    arriving = tuple(shapes(typed, ways[True], cuts[True], known.example, known.inputs.names, size))
    own, output = {}, None
    for number in plan.of_rank(mesh.devices["pp"].get_local_rank()):
        own[number] = copy.deepcopy(model)
        output = become_stage(own[number], cuts, number)
    return plan, own, output, arriving


def num_stages(schedule: str, degree: int) -> int:
    return degree if issubclass(get_schedule_class(schedule), PipelineScheduleSingle) else 2 * degree


def plan_ranks(stages: list[list[Part]], schedule: str, degree: int) -> StagePlan:
    numbers = range(len(stages))
    ranks = [min(s, 2 * degree - 1 - s) if schedule in V_SHAPED else s % degree for s in numbers]
    return StagePlan(tuple(map(tuple, stages)), tuple(ranks))
