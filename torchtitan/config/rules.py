"""What makes a configuration impossible although every single value is fine: pure, no torch, all findings at once."""

import math
import re
from collections.abc import Iterator
from pathlib import PurePath

from torchtitan.config.layout import plan_batch, plan_layout
from torchtitan.config.schema import Config
from torchtitan.models.llama.args import FLAVORS

_DEGREES = ("data_parallel_replicate", "data_parallel_shard", "tensor_parallel", "context_parallel")
Finding = tuple[tuple[str, ...], str]  # keys the finding rests on, and the message


def find_conflicts(config: Config, world_size: int | None) -> list[Finding]:
    """All conflicts; those that depend on the number of ranks only where it is known."""
    findings = [*_zeros(config), *_model(config), *_schedule(config), *_compile(config), *_data(config)]
    findings += [*_folders(config), *_splits(config)]
    if config.training.on_nonfinite == "skip" and config.optimizer.implementation != "fused":
        findings.append(
            (
                ("training.on_nonfinite", "optimizer.implementation"),
                f'training.on_nonfinite = "skip" leaves updates out on the device, which '
                f'optimizer.implementation = "{config.optimizer.implementation}" cannot; use "fused"',
            )
        )
    if world_size is not None:
        findings += _ranks(config, world_size)
    return findings


def _zeros(config: Config) -> Iterator[Finding]:
    for name in (
        "training.epochs",
        "training.num_streams",
        "training.global_batch_size",
        "parallelism.data_parallel_shard_degree",
        "validation.steps",
    ):
        section, key = name.split(".")
        if getattr(getattr(config, section), key) == 0:
            yield (name,), f"{name} = 0 would do nothing; use 1 or more, or -1 (see --help)"


def _model(config: Config) -> Iterator[Finding]:
    name, flavor = config.model.name, config.model.flavor
    keys = ("model.name", "model.flavor")
    if name not in FLAVORS:
        yield keys[:1], f'model.name = "{name}" is not a model this recipe has; use {" or ".join(FLAVORS)}'
    elif flavor not in FLAVORS[name]:
        yield keys, f'model.flavor = "{flavor}" is no flavor of {name}; use one of {", ".join(FLAVORS[name])}'
    else:
        longest = FLAVORS[name][flavor].max_seq_len
        for key, seq_len in [
            ("training.seq_len", config.training.seq_len),
            ("validation.seq_len", config.validation.seq_len if config.validation.enable else 0),
        ]:
            if seq_len > longest:
                yield (*keys, key), f"{key} = {seq_len} is longer than {name} {flavor} can be: use {longest} or less"


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
        yield (
            (*keys, "lr_scheduler.decay_ratio"),
            f"lr_scheduler.decay_ratio = {schedule.decay_ratio} of {total} steps and {schedule.warmup_steps} warmup "
            f"steps overlap; use a decay_ratio of {(total - schedule.warmup_steps) / total:.3g} or less",
        )
    if total < steps:
        yield (
            keys[1:],
            f"lr_scheduler.total_steps = {total} ends before training.steps = {steps}: the last steps would train "
            f"at the final rate; use {steps} or more, or None",
        )


def _compile(config: Config) -> Iterator[Finding]:
    recompute = config.activation_checkpoint
    option = recompute.selective_ac_option
    if recompute.mode == "selective" and option != "op" and not re.fullmatch("[1-9][0-9]*", option):
        yield (
            ("activation_checkpoint.selective_ac_option",),
            f'activation_checkpoint.selective_ac_option = "{option}" is neither "op" nor a number of blocks, as "2"',
        )
    if recompute.mode == "memory_budget" and not (config.compile.enable and "model" in config.compile.components):
        yield (
            ("activation_checkpoint.mode", "compile.enable", "compile.components"),
            'activation_checkpoint.mode = "memory_budget" is carried out by the compiler; set compile.enable = true '
            'with "model" among compile.components, or use "selective"',
        )

    if config.compile.enable and config.parallelism.tensor_parallel_degree > 1:
        yield (
            ("compile.enable", "parallelism.tensor_parallel_degree"),
            f"compile.enable = true with tensor_parallel_degree = {config.parallelism.tensor_parallel_degree} trains "
            f"wrongly (docs/log.md), so it is not had yet; set compile.enable = false, or use another parallelism",
        )
    if config.compile.enable and not config.compile.components:
        yield (
            ("compile.enable", "compile.components"),
            'compile.components = [] compiles nothing; name "model", "loss" or both, or set compile.enable = false',
        )


def _splits(config: Config) -> Iterator[Finding]:
    """What a model of this shape and sequences of this length can be split into."""
    tp, cp = config.parallelism.tensor_parallel_degree, config.parallelism.context_parallel_degree
    args = FLAVORS.get(config.model.name, {}).get(config.model.flavor)
    if args is None:
        return
    name = "parallelism.tensor_parallel_degree"
    for what, count in [("heads", args.n_heads), ("KV heads", args.n_kv_heads), ("hidden units", args.hidden_dim)]:
        if count % tp:
            fitting = ", ".join(str(d) for d in range(1, args.n_kv_heads + 1) if args.n_kv_heads % d == 0)
            yield (
                (name, "model.name", "model.flavor"),
                f"{name} = {tp} does not divide the model's {count} {what}; use one of {fitting}",
            )
            return
    pieces = 2 * cp if cp > 1 else 1  # a head and a tail piece each, see parallel/context.py
    unit = math.lcm(pieces, cp * tp)
    lengths = {"training.seq_len": config.training.seq_len}
    if config.validation.enable:
        lengths["validation.seq_len"] = config.validation.seq_len
    for key, seq_len in lengths.items():
        if seq_len % unit:
            yield (
                (key, name, "parallelism.context_parallel_degree"),
                f"{key} = {seq_len} does not divide into the pieces of context_parallel_degree {cp} and "
                f"tensor_parallel_degree {tp}; use a multiple of {unit}, as {-(-seq_len // unit) * unit}",
            )


def _folders(config: Config) -> Iterator[Finding]:
    """Folders inside the run folder: moved aside with it, so they must be its own."""
    names = {
        "metrics.save_tb_folder": config.metrics.save_tb_folder,
        "profiling.save_traces_folder": config.profiling.save_traces_folder,
        "profiling.save_memory_snapshot_folder": config.profiling.save_memory_snapshot_folder,
        "comm.save_traces_folder": config.comm.save_traces_folder,
    }
    taken = {"config.toml", "metrics.jsonl", "validation.jsonl", "earlier", "wandb", "hang"}
    for key, name in names.items():
        if PurePath(name).parts != (name,) or name == "..":
            yield (key,), f'{key} = "{name}" is a name inside job.dump_folder; use one without "/", as "tb"'
        elif name in taken:
            yield (key,), f'{key} = "{name}" is used for something else in the run folder; use another name'
        taken.add(name)


def _data(config: Config) -> Iterator[Finding]:
    if config.training.sources and config.training.dataset_path is not None:
        yield (
            ("training.sources", "training.dataset_path"),
            "training.dataset_path and [[training.sources]] both say where the data is; remove one of them",
        )
    cycle = config.profiling.profiler_warmup + config.profiling.profiler_active
    if config.profiling.enable_profiling and cycle > config.profiling.profile_freq:
        yield (
            ("profiling.profile_freq", "profiling.profiler_warmup", "profiling.profiler_active"),
            f"profiling.profile_freq = {config.profiling.profile_freq} is shorter than profiler_warmup + "
            f"profiler_active = {cycle} steps; use {cycle} or more",
        )


def _ranks(config: Config, world_size: int) -> Iterator[Finding]:
    degrees = tuple(f"parallelism.{key}_degree" for key in _DEGREES)
    try:
        dims = plan_layout(config.parallelism, world_size)
    except ValueError as error:
        yield degrees, str(error)
        return
    if config.training.global_batch_size and config.training.num_streams:  # zeros have their own message
        try:
            plan_batch(config.training, dims.dp)
        except ValueError as error:
            batch = ("training.global_batch_size", "training.local_batch_size", "training.num_streams")
            yield (*degrees, *batch), str(error)
