"""All layouts of one model on like machines, as arrays: their seconds and their bytes. No torch."""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from titan_planner.plan.cluster import Cluster
from titan_planner.plan.cost import Layout, Seconds, step
from titan_planner.plan.memory import Held, sizes_of, staged, whole
from titan_planner.plan.traffic import traffic
from torchtitan.models.operations import Number, Share, Work
from torchtitan.models.spec import Blueprint
from torchtitan.models.split import balanced_counts

FILLED = 0.9  # of a device's memory: the rest is for the context, NCCL, fragments, and for what is predicted too low
Entry = tuple[float, float, int, int]  # seconds, bytes, the number of a table, and the index in it
_AT_ONCE = 8192  # layouts: their arrays stay in a core's cache
_MOST_STAGES = 8  # on a rank; more gain little, and cost a message each
RECOMPUTES = ("none", "selective op", "full")
_BATCH = ("stages_per_rank", "microbatch", "microbatches", "passes", "regathers")
_NAMES = ("pp", "tp", "cp", "replicas", "dp", *_BATCH, "ep")


@dataclass(frozen=True)
class Job:
    """What every layout of the search has in common."""

    blueprint: Blueprint
    global_batch: int
    seq_len: int
    compiled: bool
    float8: bool
    async_tp: bool
    possible: Callable[[int, int], bool]  # tp, cp: whether the model can be split so
    fixed: Mapping[str, Any]  # values that the user gave, by the names of Choice
    wide: float = 1.0  # bytes of an activation, of those of 16 bits; its memory is counted in 16 bits
    states: float = 8.0  # bytes a parameter that the optimizer keeps


@dataclass(frozen=True)
class Choice:
    """One layout as the trainer's keys say it."""

    pp: int
    stages_per_rank: int
    tp: int
    cp: int
    replicas: int
    dp: int
    microbatch: int  # sequences
    microbatches: int  # of a pass through the pipeline; without one, of a step
    passes: int
    regathers: int
    recompute: str
    ep: int = 1

    @property
    def local_batch(self) -> int:
        return self.microbatch * (self.microbatches if self.pp > 1 else 1)

    @property
    def schedule(self) -> str:
        return "" if self.pp == 1 else "1F1B" if self.stages_per_rank == 1 else "Interleaved1F1B"


@dataclass(frozen=True)
class Table:
    """The layouts of one mode of recompute, with or without a pipeline; every column is an array."""

    columns: Mapping[str, np.ndarray]
    recompute: str
    seconds: Seconds
    held: tuple[Held, ...]  # of the first rank, and of the last one of a pipeline
    counts: Mapping[int, tuple[int, ...]]  # layers of each stage, by the number of stages
    kept: Number = 0  # bytes of a layer and microbatch that wait for backward

    @property
    def total(self) -> np.ndarray:
        return np.broadcast_to(self.seconds.total, self.columns["pp"].shape)

    @property
    def peak(self) -> np.ndarray:
        return np.broadcast_to(np.max([held.peak for held in self.held], axis=0), self.columns["pp"].shape)

    def kept_of_a_layer(self, index: int) -> float:
        return float(np.broadcast_to(self.kept, self.columns["pp"].shape)[index])

    def choice(self, index: int) -> Choice:
        return Choice(**{name: int(self.columns[name][index]) for name in _NAMES}, recompute=self.recompute)


@dataclass(frozen=True)
class Answer:
    """All layouts, and their order: the fastest that fits comes first."""

    tables: tuple[Table, ...]
    best: tuple[tuple[int, int], ...]  # table and index in it; fastest first
    too_large: tuple[tuple[int, int], ...]  # faster than the first that fits, but without the memory
    num_layouts: int
    num_fitting: int


def search(job: Job, cluster: Cluster, show: int = 10) -> Answer:
    counts: dict[int, tuple[int, ...]] = {}
    tables = [evaluate(job, cluster, columns, mode, counts) for mode, columns in layouts(job, cluster)]
    limit, fitting = FILLED * cluster.memory_bytes, 0
    best: list[Entry] = []
    large: list[Entry] = []
    for number, table in enumerate(tables):
        total, peak = table.total, table.peak
        fits = peak <= limit
        fitting += int(fits.sum())
        for found, which in ((best, fits), (large, ~fits)):
            indices = np.flatnonzero(which)
            first = indices[np.lexsort((peak[indices], total[indices]))]
            found += [(float(total[i]), float(peak[i]), number, int(i)) for i in _distinct(table, first, show)]
    best, large = _one_each(tables, sorted(best))[:show], _one_each(tables, sorted(large))[:show]
    faster = [entry for entry in large if not best or entry[0] < best[0][0]]
    return Answer(
        tuple(tables),
        tuple(entry[2:] for entry in best),
        tuple(entry[2:] for entry in faster),
        sum(len(table.columns["pp"]) for table in tables),
        fitting,
    )


def _one_each(tables: Sequence[Table], entries: Sequence[Entry]) -> list[Entry]:
    """The first entry of each pp, tp and cp: a table has one, but there are several tables."""
    first: dict[tuple[int, ...], Entry] = {}
    for entry in entries:
        columns, index = tables[entry[2]].columns, entry[3]
        first.setdefault(tuple(int(columns[name][index]) for name in ("pp", "tp", "cp")), entry)
    return list(first.values())


def _distinct(table: Table, indices: np.ndarray, most: int) -> list[int]:
    """The first layouts of each pp, tp and cp: the others differ from these in little."""
    shape = (table.columns["pp"][indices] * 1024 + table.columns["tp"][indices]) * 2**20 + table.columns["cp"][indices]
    places = np.sort(np.unique(shape, return_index=True)[1])[:most]
    found: list[int] = indices[places].tolist()
    return found


def evaluate(
    job: Job,
    cluster: Cluster,
    columns: Mapping[str, np.ndarray],
    recompute: str,
    counts: dict[int, tuple[int, ...]] | None = None,
) -> Table:
    """Seconds and bytes of these layouts, which all have a pipeline, or all have none. `counts` are found only once."""
    c, counts = columns, {} if counts is None else counts
    work = _work(job, Share(c["microbatch"], job.seq_len, c["tp"], c["cp"], c["ep"]))
    pp, per_rank = c["pp"], c["stages_per_rank"]
    keys, which = np.unique(pp * _MOST_STAGES + per_rank - 1, return_inverse=True)
    cuts = [(key // _MOST_STAGES, key % _MOST_STAGES + 1) for key in keys.tolist()]
    for ranks, stages in cuts:
        if ranks * stages not in counts:
            counts[ranks * stages] = _counts(job, ranks * stages)
    which = which.ravel()
    of_ranks = [[counts[ranks * stages][rank::ranks] for rank in range(ranks)] for ranks, stages in cuts]
    most = np.array([max(map(sum, each)) for each in of_ranks])[which]
    of_last = np.array([sum(each[-1]) for each in of_ranks])[which]
    degrees: dict[str, Any] = {name: c[name] for name in _NAMES if name != "microbatch"}
    layout = Layout(
        **degrees,
        recompute=recompute,
        compiled=job.compiled,
        float8=job.float8,
        async_tp=job.async_tp,
        wide=job.wide,
        states=job.states,
        sends_beside=per_rank > 1,  # torch's 1F1B waits for each message, its other schedules only for those they need
        most_layers=most,
        last_layers=of_last,
    )
    seconds = step(cluster.machine, work, layout)
    if (pp == 1).all():
        return Table(c, recompute, seconds, (whole(work, layout),), counts, _kept(work, recompute))
    sized = sizes_of(work, layout)
    held = tuple(staged(work, layout, sized, [e[end] for e in of_ranks], which, end * (1 - pp)) for end in (0, -1))
    return Table(c, recompute, seconds, held, counts, _kept(work, recompute))


def _kept(work: Work, recompute: str) -> Number:
    return work.layer.kept.get(recompute, 0)


def moved(job: Job, table: Table, index: int) -> list[dict[str, int]]:
    """Bytes in a step by collective, of the first rank, and of the last one of a pipeline."""
    choice = table.choice(index)
    work = _work(job, Share(choice.microbatch, job.seq_len, choice.tp, choice.cp, choice.ep))
    layout = Layout(
        **{name: getattr(choice, name) for name in _NAMES if name != "microbatch"}, recompute=choice.recompute
    )
    layers = table.counts[choice.pp * choice.stages_per_rank]
    ranks = (0,) if choice.pp == 1 else (0, choice.pp - 1)
    return [traffic(work, layout, layers[rank :: choice.pp], rank) for rank in ranks]


def _work(job: Job, share: Share) -> Work:
    assert job.blueprint.spec.operations is not None
    work: Work = job.blueprint.spec.operations(job.blueprint.shape, share)
    return work


def _counts(job: Job, num_stages: int) -> tuple[int, ...]:
    if num_stages == 1:
        return (len(job.blueprint.layers),)
    return tuple(balanced_counts(job.blueprint.parts(job.seq_len), num_stages))


def layouts(job: Job, cluster: Cluster) -> Iterator[tuple[str, dict[str, np.ndarray]]]:
    rows = np.concatenate([*_rows(job, cluster), np.empty((0, len(_NAMES)), int)])
    for is_piped in (False, True):
        some = rows[(rows[:, 0] > 1) == is_piped]
        some = some[np.lexsort((some[:, 7], some[:, 5], some[:, 0]))]  # layouts with the same pipeline come together
        if some.size:
            pieces = np.array_split(some, math.ceil(len(some) / _AT_ONCE))
            for piece, mode in itertools.product(pieces, allowed(job, "recompute", RECOMPUTES)):
                yield mode, dict(zip(_NAMES, np.ascontiguousarray(piece.T), strict=True))


def _rows(job: Job, cluster: Cluster) -> Iterator[np.ndarray]:
    """Every combination that the trainer can run, with a column for each of _NAMES."""
    world, layers = cluster.num_devices, len(job.blueprint.layers)
    splits = [
        (tp, cp)
        for tp, cp in itertools.product(allowed(job, "tp", divisors(world)), allowed(job, "cp", divisors(world)))
        if world % (tp * cp) == 0 and tp <= cluster.machine.device.per_node and job.possible(tp, cp)
    ]
    of_batch: dict[tuple[int, int], np.ndarray] = {}
    for tp, cp in splits:
        for pp in allowed(job, "pp", [d for d in divisors(world // (tp * cp)) if d <= layers]):
            ranks = world // (tp * cp * pp)
            if job.global_batch % ranks:
                continue
            if (ranks, pp) not in of_batch:
                found = [*_batches(job, job.global_batch // ranks, pp, layers)]
                of_batch[ranks, pp] = np.array(found, int).reshape(-1, 5)
            batches = of_batch[ranks, pp]
            degrees = [
                (pp, tp, cp, replicas, ranks // replicas)
                for replicas in allowed(job, "replicas", divisors(ranks))
                if ranks % replicas == 0 and ranks // replicas in allowed(job, "dp", [ranks // replicas])
            ]
            each = np.array(degrees, int).reshape(-1, 5)
            rows = np.hstack([each.repeat(len(batches), 0), np.tile(batches, (len(each), 1))])
            for ep in allowed(job, "ep", divisors(job.blueprint.num_experts or 1)):
                some = rows[rows[:, 4] * cp * tp % ep == 0]
                yield np.hstack([some, np.full((len(some), 1), ep)])


def _batches(job: Job, sequences: int, pp: int, layers: int) -> Iterator[tuple[int, ...]]:
    """Stages a rank, microbatch, microbatches, passes, regathers."""
    for microbatch in allowed(job, "microbatch", divisors(sequences)):
        if sequences % microbatch:
            continue
        count = sequences // microbatch
        if pp == 1:
            if microbatch in allowed(job, "local_batch", [microbatch]):
                for regathers in allowed(job, "regathers", (1, 0)):
                    yield 1, microbatch, count, 1, regathers
            continue
        for passes in divisors(count):
            each = count // passes
            if each * microbatch not in allowed(job, "local_batch", [each * microbatch]):
                continue
            schedule = job.fixed.get("schedule")
            if each >= pp and schedule in (None, "1F1B"):
                yield 1, microbatch, each, passes, 0
            if each % max(1, each // pp) == 0 and each >= pp and schedule in (None, "Interleaved1F1B"):
                for stages_per_rank in range(2, min(_MOST_STAGES, layers // pp) + 1):
                    yield stages_per_rank, microbatch, each, passes, 0


def allowed(job: Job, name: str, values: Any) -> Any:
    """These values, or the one of them that the user fixed."""
    return [value for value in values if value == job.fixed[name]] if name in job.fixed else values


@cache
def divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]
