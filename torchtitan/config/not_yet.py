"""torchtitan v0.2.2's keys that this version does not have, with the value that asks for nothing.

Such a key is accepted at that value, or where another of them switches it on, so that torchtitan's files load.
Anything else is refused by name: a run must never ignore what its file asks for.
"""

import copy
import difflib
import json
from typing import Any

from torchtitan.config.schema import Config

_OFF_WITH_SECTION = object()  # any value is idle while the section's switch is off
_DATALOADER = {"num_workers": 0, "persistent_workers": False, "pin_memory": False, "prefetch_factor": None}

# section -> key -> the value that asks for nothing
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
    # model.converters cannot name these sections, and without that they do nothing in torchtitan either.
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

_INSTEAD = {
    "model.tokenizer_path": "torchtitan deprecated it; set model.hf_assets_path",
    "job.save_config_file": "config.toml is always written to the run folder; remove the key",
}


def take_out(data: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Split a parsed TOML file into what the schema knows and refusals of what this version does not have."""
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
        if section not in Config.model_fields:  # the schema will not meet what is left here
            for key in [key for key, value in table.items() if not isinstance(value, dict)]:
                near = [f"{section}.{name}" for name in difflib.get_close_matches(key, keys, n=1)]
                shown = json.dumps(table.pop(key), default=str)
                refusals.append(f"{section}.{key} = {shown}: unknown key{did_you_mean(near)}")
    for section in KEYS:
        _drop_if_empty(rest, section.split("."))
    return rest, refusals


def did_you_mean(near: list[str]) -> str:
    """The end of a message about a name that is not known."""
    return f"; did you mean {near[0]}?" if near else ""


def _refusal(name: str, value: Any, idle: Any) -> str:
    advice = _INSTEAD.get(name) or (
        "remove it" if idle is None else f"remove it, or leave it at {json.dumps(idle)}, which asks for nothing"
    )
    shown = json.dumps(value, default=str)
    return f"{name} = {shown}: torchtitan v0.2.2 has this key, this version does not yet; {advice}"


def _drop_if_empty(table: dict[str, Any], path: list[str]) -> None:
    """Remove a section that held nothing but keys of the table, so that the schema does not meet it."""
    if isinstance(table.get(path[0]), dict):
        if len(path) > 1:
            _drop_if_empty(table[path[0]], path[1:])
        if not table[path[0]]:
            del table[path[0]]
