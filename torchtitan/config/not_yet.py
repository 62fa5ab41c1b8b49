"""torchtitan v0.2.2's keys that this recipe does not support, each with the value that switches nothing on.

A file may set such a key to that value, so that torchtitan's files load; so may it set the details of a feature whose
own switch is off. Any other value is refused by name: a run must never ignore what its file asks for.
"""

import copy
import difflib
import json
from typing import Any

from torchtitan.config.schema import Config

_OFF_WITH_SECTION = object()  # any value is accepted: another key would have to switch the feature on
_DATALOADER = {"num_workers": 0, "persistent_workers": False, "pin_memory": False, "prefetch_factor": None}

# section -> key -> the value that switches nothing on
KEYS: dict[str, dict[str, Any]] = {
    "job": {"save_config_file": None, "custom_config_module": ""},
    "metrics": {"save_for_all_ranks": False},
    "model": {"tokenizer_path": None, "print_after_conversion": False},
    "training": {"gc_debug": False},
    "training.dataloader": _DATALOADER,
    "parallelism": {
        "pipeline_parallel_expert_parallel_overlap": True,
        "context_parallel_load_balancer": "headtail",
        "context_parallel_rotate_method": "allgather",
        "expert_parallel_degree": 1,
        "expert_tensor_parallel_degree": 1,
        "expert_parallel_comm_backend": "standard",
    },
    "checkpoint": {"enable_ft_dataloader_checkpoints": _OFF_WITH_SECTION, "initial_load_in_hf_quantized": False},
    "activation_checkpoint": {
        "per_op_sac_force_recompute_mm_shapes_by_fqns": ["moe.router.gate"],
        "visualize_memory_budget_pareto": False,
        "debug": False,
    },
    # These sections do nothing unless model.converters names them, in torchtitan too; here it cannot name them.
    "quantize.linear.mx": dict.fromkeys(
        "mxfp8_dim1_cast_kernel_choice recipe_name filter_fqns".split(), _OFF_WITH_SECTION
    ),
    "quantize.grouped_mm.float8": dict.fromkeys(["fqns"], _OFF_WITH_SECTION),
    "quantize.grouped_mm.mx": dict.fromkeys(["recipe_name", "fqns"], _OFF_WITH_SECTION),
    "memory_estimation": {"enable": False, "disable_fake_mode": _OFF_WITH_SECTION},
    "fault_tolerance": {
        "enable": False,
        **dict.fromkeys(
            "process_group process_group_timeout_ms replica_id group_size min_replica_size semi_sync_method".split(),
            _OFF_WITH_SECTION,
        ),
    },
    "experimental": {"custom_import": "", "custom_args_module": ""},
    "validation.dataloader": _DATALOADER,
    "debug": {"moe_force_load_balance": False},
}

# Keys that never come: the reason, and what to type instead.
_INSTEAD = {
    "model.tokenizer_path": "torchtitan deprecated this key; set model.hf_assets_path instead",
    "job.save_config_file": "every run writes config.toml to its run folder; remove the key",
}


def take_out(data: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Split a parsed TOML file into the part that goes to the schema, and a refusal of each unsupported key."""
    rest: dict[str, Any] = copy.deepcopy(data)
    refusals: list[str] = []
    for section, keys in KEYS.items():
        table: Any = rest
        for part in section.split("."):
            table = table.get(part) if isinstance(table, dict) else None
        if not isinstance(table, dict):
            continue
        for key, idle in keys.items():
            if key in table:
                value = table.pop(key)
                is_idle = value == idle and type(value) is type(idle)  # 1 is not true
                if idle is not _OFF_WITH_SECTION and not is_idle:
                    refusals.append(_refusal(f"{section}.{key}", value, idle))
        if (
            section not in Config.model_fields
        ):  # the schema never sees such a section, so its unknown keys are found here
            for key in [key for key, value in table.items() if not isinstance(value, dict)]:
                near = [f"{section}.{name}" for name in difflib.get_close_matches(key, keys, n=1)]
                shown = json.dumps(table.pop(key), default=str)
                refusals.append(f"{section}.{key} = {shown}: unknown key{did_you_mean(near)}")
    for section in KEYS:
        _drop_if_empty(rest, section.split("."))
    return rest, refusals


def did_you_mean(near: list[str]) -> str:
    """The end of a message about an unknown name, given the known names that are nearest to it."""
    return f"; did you mean {near[0]}?" if near else ""


def _refusal(name: str, value: Any, idle: Any) -> str:
    fix = "remove it" if idle is None else f"remove it, or set it to {json.dumps(idle)}, which changes nothing"
    reason = _INSTEAD.get(name) or f"torchtitan v0.2.2 has this key, but this recipe does not support it yet; {fix}"
    return f"{name} = {json.dumps(value, default=str)}: {reason}"


def _drop_if_empty(table: dict[str, Any], path: list[str]) -> None:
    """Remove a section that held only unsupported keys, so that the schema does not refuse it as unknown."""
    if isinstance(table.get(path[0]), dict):
        if len(path) > 1:
            _drop_if_empty(table[path[0]], path[1:])
        if not table[path[0]]:
            del table[path[0]]
