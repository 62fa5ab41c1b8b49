"""A user's module as the recipe sees it. Nothing is derived, and no torch is imported, until a run asks for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torchtitan.config.schema import Config
from torchtitan.models.pipeline_rules import find_validation_refusals
from torchtitan.models.spec import Blueprint, ModelSpec, Part
from torchtitan.refusal import Refusal

_PP, _BY_COUNTS = "parallelism.pipeline_parallel", "is cut by pipeline_parallel_layer_counts"
_IN_PATH = "reads any weights that initial_load_path names"


@dataclass(frozen=True)
class Structure:
    """What is derived from a module and one sample. Rank 0 derives it, and tells the others."""

    parts: tuple[Part, ...]
    rest: tuple[Part, ...]  # modules whose weights have other names elsewhere: FSDP leaves them with the root
    num_parameters: int
    flops: int  # of forward and backward of one sample
    example: Any  # the inputs of a batch of one, on the meta device
    shared: tuple[tuple[str, ...], ...]  # names of one parameter
    shared_buffers: tuple[tuple[str, ...], ...]
    trained: Mapping[str, Any] = field(default_factory=dict)  # by saved name, the size of each weight with a gradient
    changing: frozenset[str] = frozenset()  # buffers that forward changes in training, under all their names
    ways: Mapping[bool, Any] = field(default_factory=dict)  # for a pipeline, how forward goes in training, and not
    tensor_words: Mapping[str, str] = field(default_factory=dict)  # a plan that came with the model, see tensor_plan.py
    mixes_types: bool = False  # forward needs torch.autocast
    target_dims: tuple[int | None, ...] = ()  # for a pipeline, of each leaf of a target the one that counts samples

    def held(self, config: Config) -> Config:
        """The configuration with the type in which weights are kept and gathered."""
        if not self.mixes_types:
            return config
        training = config.training.model_copy(update={"mixed_precision_param": config.training.dtype})
        return config.model_copy(update={"training": training})

    def saved_name(self, name: str) -> str:
        """The name of a parameter or buffer in checkpoints, where all names of one tensor are one entry."""
        return self.names_of(name)[0]

    def names_of(self, name: str) -> tuple[str, ...]:
        return next((names for names in (*self.shared, *self.shared_buffers) if name in names), (name,))


@dataclass(frozen=True)
class OwnBlueprint(Blueprint):
    """A model that says little of itself; a run fills in `structure`."""

    name: str
    spec: ModelSpec  # type: ignore[assignment]
    shape: None = None
    reads_text = False
    run = "torchtitan.own_model.run:OwnRun"
    structure: Structure | None = None

    @property
    def known(self) -> Structure:
        if self.structure is None:  # a run derives it before the model is laid out, and the dry run does
            raise Refusal(
                f"{self.name} is a model of your own, and this works only with models that read text; to take its "
                "weights away, use python -m torchtitan export"
            )
        return self.structure

    @property
    def tied(self) -> tuple[str, str] | None:
        return None  # a shared weight stays with the root, see own_model/derive.py

    def takes_muon(self, name: str) -> bool:
        return False

    def parts(self, seq_len: int = 1) -> Sequence[Part]:
        return self.known.parts

    @property
    def num_parameters(self) -> int:
        return self.known.num_parameters

    def flops_per_token(self, seq_len: int) -> int:
        """FLOPs of forward and backward of one sample."""
        return self.known.flops


def find_own_model(name: str, spec: ModelSpec) -> OwnBlueprint:
    if spec.loss is None and spec.step is None:
        raise Refusal(f"{name} has no loss: give its ModelSpec loss = ..., a function of output and target")
    if spec.data is None:
        raise Refusal(
            f"{name} brings no data: give its ModelSpec data = ..., a torch.utils.data.Dataset or a function that "
            "returns one (docs/recipe/any-model.md)"
        )
    return OwnBlueprint(name.rpartition("/")[2], spec)


def refusals(blueprint: OwnBlueprint, config: Config) -> Iterator[str]:
    """What a model of one's own cannot do."""
    spec, parallelism = blueprint.spec, config.parallelism
    for key, value, needed, reason in (
        ("parallelism.context_parallel_degree", parallelism.context_parallel_degree, 1, "has no sequence to cut"),
        ("parallelism.expert_parallel_degree", parallelism.expert_parallel_degree, 1, "has no experts to share out"),
        ("quantize.linear.float8", config.float8, None, "has no plan for float8"),
        ("optimizer.early_step_in_backward", config.optimizer.early_step_in_backward, False, "counts its samples late"),
        ("parallelism.module_fqns_per_model_part", parallelism.module_fqns_per_model_part, None, _BY_COUNTS),
        (f"{_PP}_layers_per_stage", parallelism.pipeline_parallel_layers_per_stage, None, _BY_COUNTS),
        (f"{_PP}_first_stage_less_layers", parallelism.pipeline_parallel_first_stage_less_layers, None, _BY_COUNTS),
        (f"{_PP}_last_stage_less_layers", parallelism.pipeline_parallel_last_stage_less_layers, None, _BY_COUNTS),
        ("training.preference_beta", config.training.preference_beta, None, "reads no conversations"),
        ("checkpoint.initial_load_in_hf", config.checkpoint.initial_load_in_hf, False, _IN_PATH),
        ("checkpoint.last_save_in_hf", config.checkpoint.last_save_in_hf, False, "has no Hugging Face names"),
    ):
        if value != needed:
            yield f"{key} = {value}: {blueprint.name} is a model of your own, which {reason}; use {needed}"
    if parallelism.pipeline_parallel_schedule_csv:
        yield (
            f'parallelism.pipeline_parallel_schedule_csv = "{parallelism.pipeline_parallel_schedule_csv}": a model of '
            "your own runs the schedules that have a name; use pipeline_parallel_schedule"
        )
    if parallelism.pipeline_parallel_degree > 1:
        yield from find_validation_refusals(config)
    if spec.optimizer is not None and config.checkpoint.create_seed_checkpoint:
        yield (
            f"checkpoint.create_seed_checkpoint = true: {blueprint.name} has an optimizer of its own, whose states "
            "before the first step are not known; remove it"
        )
    metrics = ["loss", *spec.metrics, *spec.metrics_of_all]
    if (config.checkpoint.keep_best or "loss").removeprefix("-") not in metrics:
        yield (
            f'checkpoint.keep_best = "{config.checkpoint.keep_best}" is no metric of {blueprint.name}; use one of '
            f"{', '.join(metrics)}"
        )
    if config.optimizer.name == "Muon":
        yield f'optimizer.name = "Muon" needs to know which weights are matrices of {blueprint.name}; use "AdamW"'
    if parallelism.pipeline_parallel_degree > 1 and spec.step is not None:
        yield (
            f"parallelism.pipeline_parallel_degree = {parallelism.pipeline_parallel_degree}: {blueprint.name} has a "
            "step of its own, which needs the whole model on each rank; use 1"
        )
