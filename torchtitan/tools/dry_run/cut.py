"""Cuts a pipeline so that every rank keeps to its memory by the dry run's own estimate, and the slowest is fast."""

import itertools
from collections.abc import Sequence
from dataclasses import replace

from torchtitan.config.schema import Config
from torchtitan.models.balance import balance
from torchtitan.models.spec import Blueprint, Part
from torchtitan.models.stages import place_stages, plan_stages, stages_a_rank
from torchtitan.observe.log import logger
from torchtitan.refusal import Refusal
from torchtitan.tools.dry_run.estimate import Estimate, check_estimable, derived, estimate, with_counts

_ROUNDS = 10  # of cutting and estimating; two or three are usual
_OF_PARAMETERS = ("parameters", "gradients", "optimizer")  # the kinds of memory that grow with them


# What a rank holds by its last estimate: bytes for each parameter, and for each FLOP (kept for backward).
BytesPer = tuple[float, float]


def fit(config: Config, blueprint: Blueprint, world_size: int) -> list[int]:
    """Layers (of a model of one's own: parts) of each stage: parallelism.pipeline_parallel_layer_counts.

    The fastest cut is estimated. What it says of each rank's memory rules out cuts, and so on with the fastest of the
    others, until the fastest that is left is one that fits.
    """
    limits = [gib * 2**30 for gib in config.parallelism.pipeline_parallel_memory_gib or ()]
    if len(limits) != (degree := config.parallelism.pipeline_parallel_degree):
        raise Refusal(
            f"parallelism.pipeline_parallel_memory_gib has {len(limits)} numbers, but pipeline_parallel_degree is "
            f"{degree}; give {degree}, one a pipeline rank"
        )
    check_estimable(config)
    blueprint = derived(config, blueprint, world_size)
    parts, ranks = what_is_cut(config, blueprint)
    if len(parts) < len(ranks):
        raise Refusal(f"the model has {len(parts)} parts, fewer than the {len(ranks)} pipeline stages; use fewer ranks")
    rates: list[BytesPer | None] = [None] * len(limits)
    known: dict[tuple[int, tuple[range, ...]], Estimate] = {}
    tried: dict[tuple[int, ...], float] = {}  # the largest share of its limit that a rank holds

    def fastest(over: float) -> list[range] | None:
        """The fastest cut in which no rank needs more than so many times its limit, by what is known of it."""

        def may(stage: int, begin: int, end: int) -> bool:
            rank = ranks[stage]
            own, limit = rates[rank], limits[rank] / ranks.count(rank)
            return own is None or _bytes(own, parts[begin:end]) <= over * limit

        return balance(parts, len(ranks), may)

    for _ in range(_ROUNDS):
        # Where nothing seems to fit, the nearest is tried: what a rank holds for a FLOP differs a little between cuts.
        cut = next(cut for power in itertools.count() if (cut := fastest(1.1**power)) is not None)
        counts = tuple(map(len, cut))
        if counts in tried and tried[counts] > 1:
            break
        if counts in tried:
            logger.info(f"parallelism.pipeline_parallel_layer_counts = {list(counts)} fits the ranks' memory")
            return list(counts)
        tried[counts] = 0.0
        for rank in range(len(limits)):
            own = tuple(stage for stage, holder in zip(cut, ranks, strict=True) if holder == rank)
            if (rank, own) not in known:
                first = rank * world_size // len(limits)
                known[rank, own] = estimate(with_counts(config, counts), blueprint, first, world_size)
            rates[rank] = _rates(known[rank, own], [parts[i] for each in own for i in each])
            tried[counts] = max(tried[counts], known[rank, own].peak_bytes / limits[rank])
    nearest = min(tried, key=tried.__getitem__)
    raise Refusal(
        f"parallelism.pipeline_parallel_memory_gib = {config.parallelism.pipeline_parallel_memory_gib}: none of the "
        f"{len(tried)} cuts tried fits; of {list(nearest)} a rank needs {tried[nearest]:.2f} times what it may hold. "
        'Use more memory or ranks, a smaller pipeline_parallel_microbatch_size, or activation_checkpoint.mode = "full"'
    )


def what_is_cut(config: Config, blueprint: Blueprint) -> tuple[list[Part], tuple[int, ...]]:
    """The units that stages are made of, and the rank of each stage."""
    if not blueprint.reads_text:
        degree, schedule = config.parallelism.pipeline_parallel_degree, config.parallelism.pipeline_parallel_schedule
        return [*blueprint.parts()], tuple(place_stages(degree * stages_a_rank(schedule), schedule, degree))
    parts = [*blueprint.parts(config.training.seq_len)]
    layers = [i for i, part in enumerate(parts) if part.kind == "layer"]
    ends = [0, *layers[1:], len(parts)]  # what lies before the layers goes with the first, the rest with the last
    units = [_together(parts[begin:end]) for begin, end in itertools.pairwise(ends)]
    return units, plan_stages(parts, config.parallelism).ranks


def _together(parts: Sequence[Part]) -> Part:
    return replace(parts[0], parameters=sum(p.parameters for p in parts), flops=sum(p.flops for p in parts))


def _rates(found: Estimate, held: Sequence[Part]) -> BytesPer:
    static = sum(found.peak.get(kind, 0) for kind in _OF_PARAMETERS)
    whole = _together(held)
    return static / max(1, whole.parameters), (found.peak_bytes - static) / max(1, whole.flops)


def _bytes(rates: BytesPer, parts: Sequence[Part]) -> float:
    by_parameter, by_flop = rates
    return sum(by_parameter * part.parameters + by_flop * part.flops for part in parts)
