"""A layout as the trainer's keys: what the user fixed, what a model can be split into, and the TOML of a choice."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tomli_w

from titan_planner.plan.search import Choice, Job
from torchtitan.config.load import ConfigError, check
from torchtitan.config.schema import Config
from torchtitan.models.families import plan_model
from torchtitan.models.spec import Blueprint
from torchtitan.refusal import Refusal

# Key of the configuration -> name in a Choice.
_KEYS = {
    "parallelism.pipeline_parallel_degree": "pp",
    "parallelism.tensor_parallel_degree": "tp",
    "parallelism.context_parallel_degree": "cp",
    "parallelism.data_parallel_replicate_degree": "replicas",
    "parallelism.data_parallel_shard_degree": "dp",
    "parallelism.expert_parallel_degree": "ep",
    "parallelism.pipeline_parallel_microbatch_size": "microbatch",
    "parallelism.pipeline_parallel_schedule": "schedule",
    "parallelism.fsdp_reshard_after_forward": "regathers",
    "training.local_batch_size": "local_batch",
    "activation_checkpoint.mode": "recompute",
}
_READINGS: Mapping[str, Mapping[Any, Any]] = {  # of keys with few values: the value in a Choice
    "regathers": {"default": 1, "never": 0},
    "recompute": {"none": "none", "selective": "selective op", "full": "full"},
    "schedule": {"1F1B": "1F1B", "Interleaved1F1B": "Interleaved1F1B"},
}


def fixed_keys(config: Config, options: Sequence[str]) -> dict[str, Any]:
    """The keys of the layout that the command line gives, as names of a Choice. Refuses what is not searched."""
    given = {option.partition("=")[0].lstrip("-").replace("-", "_") for option in options if option.startswith("--")}
    decided = [f"parallelism.{key}" for key in _PLAIN if f"parallelism.{key}" not in _KEYS]
    if unknown := sorted(given & set(decided)):
        raise Refusal(f"{unknown[0]} cannot be fixed, because the plan decides it; leave it out")
    if config.activation_checkpoint.mode == "selective" and not config.activation_checkpoint.by_operation:
        if given & {"activation_checkpoint.mode", "activation_checkpoint.selective_ac_option"}:
            raise Refusal(
                "activation_checkpoint.selective_ac_option = "
                f'"{config.activation_checkpoint.selective_ac_option}" is not searched; use "op"'
            )
    found: dict[str, Any] = {}
    for key, name in _KEYS.items():
        section, _, leaf = key.partition(".")
        value = getattr(getattr(config, section), leaf)
        if key not in given or value == -1:
            continue
        known = _READINGS.get(name, {value: value})
        if value not in known:
            raise Refusal(f'{key} = "{value}" is not searched; use one of {", ".join(known)}, or leave it out')
        found[name] = known[value]
    return found


def left_out(config: Config) -> Iterator[str]:
    """What a plan's memory and time do not know of this run."""
    training, optimizer = config.training, config.optimizer
    if training.mixed_precision_param == "float32":
        yield "training.mixed_precision_param = float32: its memory counts activations in 16 bits"
    if training.enable_cpu_offload:
        yield "training.enable_cpu_offload = true: what lies on the host is counted as on the device"
    if training.dtype != "float32":
        yield f"training.dtype = {training.dtype}: weights, gradients and states are counted in float32"
    if optimizer.name != "AdamW":
        yield f"optimizer.name = {optimizer.name}: counted as AdamW"
    if optimizer.average_decay is not None:
        yield f"optimizer.average_decay = {optimizer.average_decay}: the average of the weights is not counted"
    if optimizer.early_step_in_backward:
        yield "optimizer.early_step_in_backward = true: gradients are counted as kept"
    if config.trains_a_part:
        yield "lora.rank or training.train_only: all weights are counted as trained; the dry run knows better"
    if config.model.attn_mask_type != "causal":
        yield f"model.attn_mask_type = {config.model.attn_mask_type}: attention is counted as causal"


def is_possible(config: Config, blueprint: Blueprint, tp: int, cp: int) -> bool:
    """Whether the model, its sequences and the trainer allow these degrees, by the trainer's own rules."""
    degrees = {"tensor_parallel_degree": tp, "context_parallel_degree": cp}
    try:
        _, split = to_text(_with(config, parallelism=_PLAIN | degrees), None)
        plan_model(split)
    except ConfigError:
        return False
    return True


_PLAIN: dict[str, Any] = {
    "pipeline_parallel_degree": 1,
    "data_parallel_replicate_degree": 1,
    "data_parallel_shard_degree": -1,
    "expert_parallel_degree": 1,
    "pipeline_parallel_schedule": "1F1B",
    "pipeline_parallel_schedule_csv": "",
    "pipeline_parallel_microbatch_size": 1,
    "pipeline_parallel_layer_counts": None,
    "pipeline_parallel_memory_gib": None,
    "pipeline_parallel_layers_per_stage": None,
    "pipeline_parallel_first_stage_less_layers": None,
    "pipeline_parallel_last_stage_less_layers": None,
    "module_fqns_per_model_part": None,
    "fsdp_reshard_after_forward": "default",
}


def changed(
    config: Config, choice: Choice, job: Job, counts: Mapping[int, tuple[int, ...]], plan: str | None = None
) -> Config:
    """The run with this layout, which compares itself with its plan at its end."""
    parallelism = _PLAIN | {
        "pipeline_parallel_degree": choice.pp,
        "data_parallel_replicate_degree": choice.replicas,
        "data_parallel_shard_degree": choice.dp,
        "context_parallel_degree": choice.cp,
        "tensor_parallel_degree": choice.tp,
        "expert_parallel_degree": choice.ep,
    }
    if choice.pp > 1:
        parallelism |= {
            "pipeline_parallel_schedule": choice.schedule,
            "pipeline_parallel_microbatch_size": choice.microbatch,
            "pipeline_parallel_layer_counts": list(counts[choice.pp * choice.stages_per_rank]),
        }
    elif choice.regathers == 0:
        parallelism |= {"fsdp_reshard_after_forward": "never"}
    mode = (
        {"mode": "selective", "selective_ac_option": "op"} if "op" in choice.recompute else {"mode": choice.recompute}
    )
    return _with(
        config,
        parallelism=parallelism,
        training={"local_batch_size": choice.local_batch, "global_batch_size": job.global_batch},
        validation={"local_batch_size": choice.local_batch} if config.validation.enable else {},
        activation_checkpoint=mode,
        job={"plan": plan},
    )


def _with(config: Config, **sections: Mapping[str, Any]) -> Config:
    return config.model_copy(
        update={name: getattr(config, name).model_copy(update=dict(values)) for name, values in sections.items()}
    )


def to_text(config: Config, world_size: int | None) -> tuple[str, Config]:
    """What differs from the defaults, as TOML, and the same checked; raises ConfigError with all mistakes."""
    data = config.model_dump(exclude_defaults=True, exclude_none=True, exclude={"job": {"config_file"}})
    return tomli_w.dumps(data), check(data, "the plan", world_size)
