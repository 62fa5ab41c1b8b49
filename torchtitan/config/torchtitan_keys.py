"""Reads torchtitan's keys that are not keys of this recipe, in files and options since April 2024.

A key that has another name today is taken under today's name, with a warning. A key that this recipe does not support
is accepted with the value that switches nothing on, and as a detail of a feature that its own switch leaves off. Any
other value is refused, with the reason: a run must never ignore what its file asks for. The older names are those of
torchtitan/config_manager.py and torchtitan/config/job_config.py in https://github.com/pytorch/torchtitan.
"""

import copy
import difflib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import tomli

from torchtitan.config.mistakes import as_json
from torchtitan.config.names import flat, key_names, sections
from torchtitan.config.schema import Parallelism

_OFF_WITH_SECTION = object()  # any value is accepted: another key would have to switch the feature on
_DATALOADER = {"num_workers": 0, "persistent_workers": False, "pin_memory": False, "prefetch_factor": None}
_FLOAT8 = {"model.converters": ["quantize.linear.float8"]}

# section -> key -> the value that switches nothing on
KEYS: dict[str, dict[str, Any]] = {
    "job": {"save_config_file": None, "custom_config_module": "", "use_for_integration_test": _OFF_WITH_SECTION},
    "metrics": {"save_for_all_ranks": False},
    "model": {"print_after_conversion": False},
    "training": {"gc_debug": False},
    "training.dataloader": _DATALOADER,
    "parallelism": {
        "pipeline_parallel_expert_parallel_overlap": True,
        "pipeline_parallel_split_points": [],
        "pipeline_parallel_microbatches": None,
        "enable_compiled_autograd": False,
        "context_parallel_load_balancer": "headtail",
        "context_parallel_rotate_method": "allgather",
        "expert_tensor_parallel_degree": 1,
        "expert_parallel_comm_backend": "standard",
    },
    "checkpoint": {"enable_ft_dataloader_checkpoints": _OFF_WITH_SECTION, "initial_load_in_hf_quantized": False},
    "activation_checkpoint": {
        "per_op_sac_force_recompute_mm_shapes_by_fqns": ["moe.router.gate"],
        "visualize_memory_budget_pareto": False,
        "debug": False,
    },
    "quantize.linear.float8": {"force_recompute_fp8_weight_in_bwd": False}
    | dict.fromkeys(["scaling_type_input", "scaling_type_weight", "scaling_type_grad_output"], "dynamic"),
    # These sections do nothing unless model.converters names them, in torchtitan too; here it cannot name them.
    "quantize.linear.mx": dict.fromkeys(
        "mxfp8_dim1_cast_kernel_choice use_fp8_dim1_cast_triton_kernel recipe_name filter_fqns".split(),
        _OFF_WITH_SECTION,
    ),
    "quantize.grouped_mm.float8": dict.fromkeys(["fqns"], _OFF_WITH_SECTION),
    "quantize.grouped_mm.mx": dict.fromkeys(["recipe_name", "fqns"], _OFF_WITH_SECTION),
    "memory_estimation": {"enable": False, "disable_fake_mode": _OFF_WITH_SECTION},
    "fault_tolerance": {
        "enable": False,
        **dict.fromkeys(
            "process_group process_group_timeout_ms replica_id group_size min_replica_size semi_sync_method "
            "sync_steps should_quantize fragment_sync_delay fragment_update_alpha num_fragments".split(),
            _OFF_WITH_SECTION,
        ),
    },
    "experimental": {"custom_import": "", "custom_args_module": "", "custom_model_path": ""},
    "validation.dataloader": _DATALOADER,
    "debug": {"moe_force_load_balance": False},
}

_IDLE = {f"{section}.{key}": value for section, keys in KEYS.items() for key, value in keys.items()}

# An older name -> today's. Keys of [parallelism] were in [training] and [experimental]; `_today` knows them.
_RENAMED = {
    "activation_checkpoint.determinism_check_mode": "activation_checkpoint.determinism_check",
    "checkpoint.enable_checkpoint": "checkpoint.enable",
    "checkpoint.initial_load_model_weights_only": "checkpoint.initial_load_model_only",
    "checkpoint.last_save_in_safetensors": "checkpoint.last_save_in_hf",
    "checkpoint.last_save_in_safetensors_format": "checkpoint.last_save_in_hf",
    "checkpoint.last_save_model_weights_only": "checkpoint.last_save_model_only",
    "checkpoint.model_weights_only": "checkpoint.last_save_model_only",
    "job.print_args": "job.print_config",
    "lr_scheduler.lr_min": "lr_scheduler.min_lr_factor",
    "memory_estimation.enabled": "memory_estimation.enable",
    "model.tokenizer_path": "model.hf_assets_path",
    "profiling.profile_every_x_iter": "profiling.profile_freq",
    "profiling.run_profiler": "profiling.enable_profiling",
    "training.batch_size": "training.local_batch_size",
    "training.checkpoint_interval": "checkpoint.interval",
    "training.compile": "compile.enable",
    "training.compiled_autograd": "parallelism.enable_compiled_autograd",
    "training.data_parallel_degree": "parallelism.data_parallel_shard_degree",
    "training.deterministic": "debug.deterministic",
    "training.seed": "debug.seed",
    "training.sequence_parallel_degree": "parallelism.tensor_parallel_degree",
    "training.warmup_steps": "lr_scheduler.warmup_steps",
    "validation.batch_size": "validation.local_batch_size",
    "validation.enabled": "validation.enable",
}
_SECTIONS = {"float8": "quantize.linear.float8", "mx": "quantize.linear.mx"}

# An older key -> for each value (in JSON) the same in today's keys.
_MEANT: dict[str, dict[str, dict[str, Any]]] = {
    "checkpoint.interval_type": {'"steps"': {}},
    "float8.enable_float8_linear": {"true": _FLOAT8, "false": {}},
    "metrics.enable_color_printing": {
        "true": {"metrics.disable_color_printing": False},
        "false": {"metrics.disable_color_printing": True},
    },
    "metrics.rank_0_only": {"true": {}},
    "model.norm_type": {'"rmsnorm"': {}, '"fused_rmsnorm"': {}, '"compiled_rmsnorm"': {}},
    "optimizer.fused": {
        "true": {"optimizer.implementation": "fused"},
        "false": {"optimizer.implementation": "foreach"},
    },
    "training.checkpoint_interval_type": {'"steps"': {}},
    "training.enable_float8_linear": {"true": _FLOAT8, "false": {}},
    "training.enable_fp8_linear": {"true": _FLOAT8, "false": {}},
    "training.enable_loss_parallel": {
        "true": {"parallelism.disable_loss_parallel": False},
        "false": {"parallelism.disable_loss_parallel": True},
    },
    "training.enable_selective_ac": {},
    "training.fp8_linear": {'"dynamic"': _FLOAT8, '""': {}, "false": {}},
    "training.fp8_linear_type": {'"dynamic"': _FLOAT8, '""': {}},
    "training.checkpoint_folder": {'""': {}},
}

_OWN_MODEL = (
    'a model of your own is imported by model.name = "path/to/file.py:SPEC" (docs/recipe/models.md); remove the key'
)
_MINUTES = "this recipe counts steps in checkpoint.interval, and time in checkpoint.interval_minutes"

# What to type instead of a refused key.
_INSTEAD = {
    "activation_checkpoint.debug": "recomputed tensors are always checked (activation_checkpoint.determinism_check)",
    "checkpoint.interval_type": _MINUTES,
    "experimental.custom_args_module": _OWN_MODEL,
    "experimental.custom_import": _OWN_MODEL,
    "experimental.custom_model_path": _OWN_MODEL,
    "fault_tolerance.enable": "MAX_RESTARTS=3 ./run_llama_train.sh restarts a run that fails "
    '(docs/recipe/checkpoints.md); with semi_sync_method = "diloco" or "local_sgd" the section is read as [swarm]; '
    "remove the key, or set that one",
    "job.custom_config_module": _OWN_MODEL,
    "job.save_config_file": "every run writes config.toml to its run folder; remove the key",
    "memory_estimation.enable": "python -m torchtitan dry_run FILE.toml estimates the memory; remove the key",
    "metrics.rank_0_only": "rank 0 writes averages over all ranks, and the largest loss of a rank; remove the key",
    "metrics.save_for_all_ranks": "rank 0 writes averages over all ranks, and the largest loss of a rank; remove it",
    "model.norm_type": "each family has its own norm; remove the key",
    "parallelism.enable_compiled_autograd": "compile.enable compiles the backward of each block too; remove the key",
    "parallelism.pipeline_parallel_microbatches": "set parallelism.pipeline_parallel_microbatch_size to "
    "training.local_batch_size divided by this number",
    "parallelism.pipeline_parallel_split_points": "set parallelism.pipeline_parallel_layer_counts to the number of "
    "layers of each stage",
    "training.checkpoint_folder": "set checkpoint.enable = true and checkpoint.folder",
    "training.checkpoint_interval_type": _MINUTES,
    "training.dataloader.num_workers": "a thread of each rank reads ahead, and the verb prepare tokenizes once for "
    "all runs (docs/recipe/data.md); remove the key",
    "training.enable_selective_ac": 'set activation_checkpoint.mode to "selective", "full" or "none"',
    "validation.dataloader.num_workers": "a thread of each rank reads ahead; remove the key",
}


# With fault_tolerance.enable and a semi_sync_method, its keys say what [swarm] says.
_OF_SWARM = {
    "sync_steps": "every",
    "num_fragments": "fragments",
    "fragment_sync_delay": "delay",
    "fragment_update_alpha": "mix",
    "min_replica_size": "quorum",
}
_SEMI_SYNC = {"diloco": "diloco", "local_sgd": "average"}


@dataclass
class Reading:
    """Values under today's keys, what to tell the user, and what is refused."""

    values: dict[str, Any]
    warnings: list[str] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)


def read(data: dict[str, Any]) -> Reading:
    """Take torchtitan's keys out of the tables of a file, or of options that `take_options` found."""
    reading = Reading(copy.deepcopy(data))
    if _is_semi_sync(data.get("fault_tolerance")):
        _read_semi_sync(reading)
        data = reading.values
    for name, value in flat(data).items():
        today = _today(name)
        if name in _MEANT:
            _pop(reading.values, name)
            _put_meaning(reading, name, value)
        elif today != name:
            _pop(reading.values, name)
            if today not in _IDLE:
                _put(reading, name, value, {today: value})
        if today in _IDLE:
            _pop(reading.values, name)
            idle = _IDLE[today]
            if idle is not _OFF_WITH_SECTION and not (value == idle and type(value) is type(idle)):
                reading.refusals.append(_refusal(today, name, value, idle))
        elif (section := name.rpartition(".")[0]) in KEYS and section not in sections() and today == name:
            _pop(reading.values, name)  # the schema never sees such a section
            near = difflib.get_close_matches(name.rpartition(".")[2], KEYS[section], n=1)
            known = f"; did you mean {section}.{near[0]}?" if near else ""
            reading.refusals.append(f"{name} = {as_json(value)}: unknown key{known}")
    _read_converters(reading, data)
    for section in [*KEYS, *_SECTIONS]:
        _drop_if_empty(reading.values, section.split("."))
    return reading


def take_options(argv: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """Torchtitan's options apart from the rest, of which the parser knows: as tables, like those of a file."""
    rest: list[str] = []
    taken: dict[str, Any] = {}
    words = list(argv)
    while words:
        word = words.pop(0)
        option, equals, value = word.partition("=")
        name = option.removeprefix("--").replace("-", "_")
        today = _today(name)
        if not word.startswith("--") or (name not in _MEANT and today == name and name not in _IDLE):
            rest.append(word)
            continue
        if not equals:
            value = words.pop(0) if words and not words[0].startswith("--") else "true"
        section, _, key = today.rpartition(".")
        wanted = sections()[section].model_fields.get(key) if section in sections() else None
        if wanted is not None and "list[" in str(wanted.annotation):
            _set(taken, name, [part for part in value.split(",") if part])
            continue
        try:
            _set(taken, name, tomli.loads(f"x = {value}")["x"])
        except ValueError:
            _set(taken, name, value)
    return rest, taken


def _today(name: str) -> str:
    """Today's name of a key, as it is where the key has no other."""
    section, _, key = name.rpartition(".")
    if section in ("training", "experimental") and name not in key_names():
        moved = key in Parallelism.model_fields or key in KEYS["parallelism"]
        name = f"parallelism.{key}" if moved else name
    return _RENAMED.get(name) or (f"{_SECTIONS[section]}.{key}" if section in _SECTIONS else name)


def _put_meaning(reading: Reading, name: str, value: Any) -> None:
    meanings = _MEANT[name]
    if (meant := meanings.get(as_json(value))) is not None:
        _put(reading, name, value, meant)
        return
    accepted = f" ({' or '.join(meanings)} is accepted)" if meanings else ""
    reason = _INSTEAD.get(name, "torchtitan has dropped this key")
    reading.refusals.append(f"{name} = {as_json(value)}: {reason}{accepted}")


def _put(reading: Reading, name: str, value: Any, meant: dict[str, Any]) -> None:
    present = flat(reading.values)
    for today, new in meant.items():
        if today in present and present[today] != new and today != "model.converters":
            reading.refusals.append(
                f"{name} = {as_json(value)}: {today} says the same today, and is set too; remove one"
            )
            return
        _set(reading.values, today, new)
    said = ", ".join(f"{today} = {as_json(new)}" for today, new in meant.items())
    reading.warnings.append(
        f"{name} = {as_json(value)} is torchtitan's older name: " + (said or "nothing to set today")
    )


def _read_converters(reading: Reading, data: dict[str, Any]) -> None:
    """While the section was [float8], so was the name of the converter. Without that section, the name is refused."""
    converters = flat(data).get("model.converters")
    if isinstance(converters, list) and "float8" in converters and "float8" in data:
        new = ["quantize.linear.float8" if name == "float8" else name for name in converters]
        _set(reading.values, "model.converters", new)
        reading.warnings.append('model.converters: "float8" is the older name of "quantize.linear.float8"')


def _is_semi_sync(section: Any) -> bool:
    if not isinstance(section, dict) or section.get("enable") is not True or "swarm" not in sections():
        return False
    return str(section.get("semi_sync_method")).lower() in _SEMI_SYNC


def _read_semi_sync(reading: Reading) -> None:
    """Sites that meet every so many steps are a swarm here; what names the replica there, the keys of the site do."""
    section = reading.values.pop("fault_tolerance")
    if unknown := {key: value for key, value in section.items() if key not in KEYS["fault_tolerance"]}:
        reading.values["fault_tolerance"] = unknown
    meant: dict[str, Any] = {"swarm.method": _SEMI_SYNC[str(section["semi_sync_method"]).lower()]}
    meant["swarm.codec"] = "int8" if section.get("should_quantize", True) else "float32"
    meant |= {f"swarm.{ours}": section[theirs] for theirs, ours in _OF_SWARM.items() if theirs in section}
    _put(reading, "fault_tolerance.enable", True, meant)
    reading.warnings.append("fault_tolerance: without swarm.syncer, this run trains alone (docs/fleet/swarm.md)")


def _refusal(today: str, name: str, value: Any, idle: Any) -> str:
    fix = "remove it" if idle is None else f"remove it, or set it to {as_json(idle)}, which changes nothing"
    reason = _INSTEAD.get(today) or f"torchtitan v0.2.2 has this key, but this recipe does not support it yet; {fix}"
    return f"{name} = {as_json(value)}: {reason}"


def _set(table: dict[str, Any], name: str, value: Any) -> None:
    *path, key = name.split(".")
    for part in path:
        table = table.setdefault(part, {})
    table[key] = value


def _pop(table: dict[str, Any], name: str) -> None:
    *path, key = name.split(".")
    for part in path:
        table = table.get(part, {})
    table.pop(key, None)


def _drop_if_empty(table: dict[str, Any], path: list[str]) -> None:
    """Remove a section that held only such keys, so that the schema does not refuse it as unknown."""
    if isinstance(table.get(path[0]), dict):
        if len(path) > 1:
            _drop_if_empty(table[path[0]], path[1:])
        if not table[path[0]]:
            del table[path[0]]
