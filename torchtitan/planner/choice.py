"""A layout as the trainer's keys: what the user fixed, what a model can be split into, and the TOML of a choice."""

from collections.abc import Mapping, Sequence
from typing import Any

import tomli_w

from torchtitan.config.load import ConfigError, check
from torchtitan.config.schema import Config
from torchtitan.models.families import plan_model
from torchtitan.models.spec import Blueprint
from torchtitan.planner.search import Choice, Job

# Key of the configuration -> name in a Choice.
_KEYS = {
    "parallelism.pipeline_parallel_degree": "pp",
    "parallelism.tensor_parallel_degree": "tp",
    "parallelism.context_parallel_degree": "cp",
    "parallelism.data_parallel_replicate_degree": "replicas",
    "parallelism.data_parallel_shard_degree": "dp",
    "parallelism.pipeline_parallel_microbatch_size": "microbatch",
    "parallelism.pipeline_parallel_schedule": "schedule",
    "parallelism.fsdp_reshard_after_forward": "regathers",
    "training.local_batch_size": "local_batch",
    "activation_checkpoint.mode": "recompute",
}
_RESHARDS = {"default": 1, "always": 1, "never": 0}
_MODES = {"selective": "selective op"}


def fixed_keys(config: Config, options: Sequence[str]) -> dict[str, Any]:
    """The keys of the layout that the command line gives, as names of a Choice."""
    given = {option.partition("=")[0].lstrip("-").replace("-", "_") for option in options if option.startswith("--")}
    found: dict[str, Any] = {}
    for key, name in _KEYS.items():
        section, _, leaf = key.partition(".")
        value = getattr(getattr(config, section), leaf)
        if key not in given or value == -1:
            continue
        found[name] = (
            _RESHARDS[value] if name == "regathers" else _MODES.get(value, value) if name == "recompute" else value
        )
    return found


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


def changed(config: Config, choice: Choice, job: Job, counts: Mapping[int, tuple[int, ...]]) -> Config:
    """The run with this layout."""
    parallelism = _PLAIN | {
        "pipeline_parallel_degree": choice.pp,
        "data_parallel_replicate_degree": choice.replicas,
        "data_parallel_shard_degree": choice.dp,
        "context_parallel_degree": choice.cp,
        "tensor_parallel_degree": choice.tp,
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
    )


def _with(config: Config, **sections: Mapping[str, Any]) -> Config:
    return config.model_copy(
        update={name: getattr(config, name).model_copy(update=dict(values)) for name, values in sections.items()}
    )


def to_text(config: Config, world_size: int | None) -> tuple[str, Config]:
    """What differs from the defaults, as TOML, and the same checked; raises ConfigError with all mistakes."""
    data = config.model_dump(exclude_defaults=True, exclude_none=True, exclude={"job": {"config_file"}})
    return tomli_w.dumps(data), check(data, "the plan", world_size)
