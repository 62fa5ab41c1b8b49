"""Finds values that are fine alone and impossible together. Pure, without torch; all findings are listed at once."""

import math
from collections.abc import Iterator
from pathlib import PurePath

from torchtitan.config.layout import plan_batch, plan_layout
from torchtitan.config.schema import Config, Lora, Parallelism, other_sections
from torchtitan.config.section import Finding
from torchtitan.refusal import Refusal

RECORDS = ["config.toml", "metrics.jsonl", "validation.jsonl"]
# What a run writes by itself.
RUN_FILES = [*RECORDS, "wandb", "loss.png", "plan_measured.json", "hang", "hf", "load_only", "swarm.jsonl", "swarm.svg"]
RUN_FILES += ["scores", "answers.json", "experts.png"]


def find_conflicts(config: Config, world_size: int | None) -> list[Finding]:
    """All conflicts. Rules that depend on the number of ranks are checked only if it is known."""
    findings = [*_schedule(config), *_data(config), *_folders(config)]
    if config.float8 is not None:
        from torchtitan.config.float8_rules import find_float8_conflicts

        findings += find_float8_conflicts(config, config.float8)
    findings += [finding for section in other_sections(config) for finding in section.conflicts()]
    if _uses_seldom_keys(config):
        from torchtitan.config.seldom_rules import find_seldom_conflicts

        findings += find_seldom_conflicts(config)
    return findings if world_size is None else [*findings, *_ranks(config, world_size)]


def _uses_seldom_keys(config: Config) -> bool:
    recompute = config.activation_checkpoint
    recomputes = recompute.mode == "memory_budget" or recompute.selective_ac_option != "2" or config.compile.enable
    early = config.optimizer.early_step_in_backward or config.parallelism.enable_async_tensor_parallel
    chats = any(part.chat for part in (config.training, config.validation, *config.training.sources))
    updates = (config.optimizer.name, config.optimizer.implementation) != ("AdamW", "fused")
    updates = updates or config.training.mixed_precision_param == "float16"
    learns = config.trains_a_part or config.lora != Lora() or config.training.preference_beta is not None
    usual, fields = ("enable", "folder", "interval", "keep_latest_k"), type(config.checkpoint).model_fields
    keeps = any(value != fields[key].default for key, value in config.checkpoint if key not in usual)
    validation = config.validation
    judges = bool(validation.tasks) or validation.tasks_limit is not None or validation.patience is not None
    return recomputes or early or chats or updates or learns or keeps or judges


def _schedule(config: Config) -> Iterator[Finding]:
    schedule, steps = config.lr_scheduler, config.training.steps
    total = schedule.total_steps or steps
    keys = ("lr_scheduler.warmup_steps", "lr_scheduler.total_steps", "training.steps")
    if schedule.warmup_steps > total:
        yield (
            keys,
            f"lr_scheduler.warmup_steps = {schedule.warmup_steps} is longer than the schedule of {total} steps: the "
            f"learning rate would never reach optimizer.lr; use {max(1, total // 5)}, or train longer",
        )
    elif schedule.decay_ratio is not None and schedule.warmup_steps + round(schedule.decay_ratio * total) > total:
        most = math.floor(1000 * (total - schedule.warmup_steps) / total) / 1000
        yield (
            (*keys, "lr_scheduler.decay_ratio"),
            f"lr_scheduler.decay_ratio = {schedule.decay_ratio} of {total} steps and {schedule.warmup_steps} warmup "
            f"steps overlap; use a decay_ratio of {most:g} or less",
        )
    if total < steps:
        yield (
            keys[1:],
            f"lr_scheduler.total_steps = {total} ends before training.steps = {steps}: the last steps would train "
            f"at the final rate; use {steps} or more, or None",
        )


def run_folders(config: Config) -> dict[str, str]:
    """The folders in the run folder that the configuration names, by their keys."""
    folders = {
        "metrics.save_tb_folder": config.metrics.save_tb_folder,
        "profiling.save_traces_folder": config.profiling.save_traces_folder,
        "profiling.save_memory_snapshot_folder": config.profiling.save_memory_snapshot_folder,
        "comm.save_traces_folder": config.comm.save_traces_folder,
    }
    is_remote = "://" in config.checkpoint.folder
    return folders if is_remote else folders | {"checkpoint.folder": config.checkpoint.folder}


def _folders(config: Config) -> Iterator[Finding]:
    """Folders inside the run folder: moved aside with it, so they must be its own."""
    scheme, _, place = config.checkpoint.folder.partition("://")
    if "://" in config.checkpoint.folder and (scheme in ("http", "https") or not place.strip("/")):
        yield (
            ("checkpoint.folder",),
            f'checkpoint.folder = "{config.checkpoint.folder}" is no place to write; use one as "s3://bucket/run"',
        )
    taken = {*RUN_FILES, "earlier", "checkpoint" if "://" in config.checkpoint.folder else ""}
    for key, name in run_folders(config).items():
        if PurePath(name).parts != (name,) or name == "..":
            yield (key,), f'{key} = "{name}" must be a name inside job.dump_folder; use one without "/", as "tb"'
        elif name in taken:
            yield (key,), f'{key} = "{name}" already names something else in the run folder; use another name'
        taken.add(name)


def _data(config: Config) -> Iterator[Finding]:
    if config.training.sources and config.training.dataset_path is not None:
        yield (
            ("training.sources", "training.dataset_path"),
            "training.dataset_path and [[training.sources]] both name the data; remove one of them",
        )
    cycle = config.profiling.profiler_warmup + config.profiling.profiler_active
    if config.profiling.enable_profiling and cycle > config.profiling.profile_freq:
        yield (
            ("profiling.profile_freq", "profiling.profiler_warmup", "profiling.profiler_active"),
            f"profiling.profile_freq = {config.profiling.profile_freq} is shorter than profiler_warmup + "
            f"profiler_active = {cycle} steps; use {cycle} or more",
        )


def _ranks(config: Config, world_size: int) -> Iterator[Finding]:
    degrees = tuple(f"parallelism.{key}" for key in Parallelism.model_fields if key.endswith("_degree"))
    try:
        dims = plan_layout(config.parallelism, world_size)
    except Refusal as error:
        yield degrees, str(error)
        return
    batch = ("training.global_batch_size", "training.local_batch_size", "training.num_streams")
    try:
        plan = plan_batch(config.training, dims.dp)
    except Refusal as error:
        yield (*degrees, *batch), str(error)
        return
    if config.optimizer.early_step_in_backward and plan.num_local_batches > 1:
        from torchtitan.config.seldom_rules import of_early_step

        yield of_early_step(plan, (*degrees, *batch))
