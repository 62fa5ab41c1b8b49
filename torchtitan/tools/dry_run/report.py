"""Estimate memory and traffic of a run without its machines, for one rank of each pipeline stage: the fullest.

python -m torchtitan dry_run train_configs/llama3_405b.toml --world_size 512
"""

from collections.abc import Sequence

import torch

from torchtitan.config.layout import plan_batch, plan_layout
from torchtitan.config.schema import Config
from torchtitan.hardware import Place
from torchtitan.models.spec import Blueprint
from torchtitan.models.stages import StagePlan, plan_stages
from torchtitan.observe.log import logger
from torchtitan.refusal import Refusal
from torchtitan.tools.dry_run.cut import fit
from torchtitan.tools.dry_run.estimate import (
    Estimate,
    check_estimable,
    derived,
    estimate,
    runs_every_block,
    with_counts,
)
from torchtitan.tools.dry_run.footprint import COLLECTIVES, KINDS

_UNITS = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10}
_SHADES, _BAR = "█▓▒░", 60  # of a bar, and its length


def dry_run(config: Config, blueprint: Blueprint, place: Place) -> list[Estimate]:
    """Estimate and print every pipeline rank; raise a Refusal if one does not fit this machine's GPU."""
    if place.rank:
        raise Refusal(
            f"the dry run was started with RANK={place.rank}, but one process plays all ranks; start it "
            f"without torchrun, as WORLD_SIZE={place.world_size} python train.py ..."
        )
    if config.compile.enable:
        logger.info(
            "compile.enable = true: the estimate counts what a compiled SwiGLU saves; a step may hold still less"
        )
    check_estimable(config)
    blueprint = derived(config, blueprint, place.world_size)
    dims = plan_layout(config.parallelism, place.world_size)
    size = str(plan_batch(config.training, dims.dp).global_batch_size)
    logger.info(
        f"dry run of {config.job.description}: "
        + (f"{blueprint.num_parameters:,} parameters" if blueprint.reads_text else blueprint.name)
        + f" on {place.world_size} ranks, mesh {dims}, global batch {size}"
        + (f" x {config.training.seq_len} tokens" if blueprint.reads_text else "")
    )
    limits = config.parallelism.pipeline_parallel_memory_gib
    if limits and config.parallelism.pipeline_parallel_layer_counts is None:
        config = with_counts(config, fit(config, blueprint, place.world_size))
    if blueprint.reads_text and (reason := runs_every_block(config, blueprint)):
        logger.info(f"{reason}, so the dry run has to run every block and takes longer")
    capacities = [int(gib * 2**30) for gib in limits] if limits else [gpu_memory_bytes()] * dims.pp
    estimates = []
    for stage in range(dims.pp):
        estimates.append(estimate(config, blueprint, stage * place.world_size // dims.pp, place.world_size))
        if stage == 0:
            unit = unit_of(estimates[0].peak_bytes)
            print(f"{unit} held at the peak, and {unit} moved in a step:")
            moves = [name for name in COLLECTIVES if name != "all-to-all" or dims.ep > 1]
            print(_row("rank", "stages have", [*KINDS, "peak", *moves], ["peak", *moves]))
        print(describe(estimates[-1], capacities[stage], unit, moves), flush=True)
    print(bars(estimates))
    if dims.ep > 1:
        most = _in_words(max(each.at_twice_the_load for each in estimates))
        print(f"this takes the load of experts as even; a rank whose experts get twice as many tokens holds {most}")
    if dims.pp > 1 and blueprint.reads_text:
        print(cut(plan_stages(blueprint.parts(), config.parallelism), place.world_size // dims.pp))
    print(verdict(estimates, capacities))
    return estimates


def gpu_memory_bytes() -> int | None:
    """Return the memory of this machine's first GPU, or None without one."""
    return torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else None


def unit_of(size: int) -> str:
    """The unit in which a size, and those like it, can be read: a small model has no GiB to show."""
    return next((unit for unit, bytes_ in _UNITS.items() if size >= bytes_ / 10), "KiB")


def _in_words(size: int) -> str:
    unit = unit_of(size)
    return f"{size / _UNITS[unit]:.2f} {unit}"


def describe(estimate: Estimate, capacity: int | None, unit: str, moves: Sequence[str]) -> str:
    """The rank's line of the table."""
    values = [*estimate.peak.values(), estimate.peak_bytes, *(estimate.moved.get(name, 0) for name in moves)]
    passes = capacity is None or estimate.peak_bytes <= capacity
    return _row(
        str(estimate.rank),
        f"{estimate.parameters:,}",
        [f"{value / _UNITS[unit]:.3f}" for value in values],
        ["peak", *moves],
        "  passes" if passes else "  too large",
    )


def _row(rank: str, parameters: str, values: list[str], names: Sequence[str], last: str = "") -> str:
    columns = zip([*KINDS, *names], values, strict=True)
    return f"{rank:>5} {parameters:>15} " + " ".join(f"{value:>{max(8, len(name))}}" for name, value in columns) + last


def bars(estimates: list[Estimate]) -> str:
    """What fills each pipeline rank at its peak; the longest bar is the largest rank's."""
    largest = max(estimate.peak_bytes for estimate in estimates)
    shades = dict(zip(KINDS, _SHADES, strict=True))
    lines = ["  ".join(f"{shade} {kind}" for kind, shade in shades.items())]
    for each in estimates:
        parts = "".join(
            shades[kind] * round(_BAR * size / max(1, largest)) for kind, size in each.peak.items() if kind in shades
        )
        lines.append(f"{each.rank:>5} {parts} {_in_words(each.peak_bytes)}")
    return "\n".join(lines)


def cut(plan: StagePlan, step: int) -> str:
    """Which part of the model each stage has, by its first rank; `step` is the distance of two pipeline ranks."""
    lines, begin, total = ["the pipeline's cut:"], 0, sum(map(len, plan.stages))
    for number, (parts, rank) in enumerate(zip(plan.stages, plan.ranks, strict=True)):
        left, right = (round(_BAR * place / total) for place in (begin, begin + len(parts)))
        span = f"{parts[0].name} to {parts[-1].name}"
        lines.append(
            f"{rank * step:>5} {' ' * left}{'■' * (right - left)}{' ' * (_BAR - right)} stage {number}: {span}"
        )
        begin += len(parts)
    return "\n".join(lines)


def verdict(estimates: list[Estimate], capacities: Sequence[int | None]) -> str:
    """Say that each rank fits its GPU, and how the fullest does; raise a Refusal if it does not."""
    fullest, capacity = max(
        zip(estimates, capacities, strict=True), key=lambda pair: pair[0].peak_bytes / (pair[1] or 1)
    )
    need = f"rank {fullest.rank} holds {_in_words(fullest.peak_bytes)} at its peak"
    if capacity is None:
        return f"every pipeline rank passes; {need}, this machine has no GPU to compare with"
    if fullest.peak_bytes > capacity:
        raise Refusal(
            f"{need}, but its GPU has {_in_words(capacity)}; use more ranks, a smaller "
            f'training.local_batch_size, or activation_checkpoint.mode = "full"'
        )
    return f"every pipeline rank fits; {need}, and its GPU has {_in_words(capacity)}"
