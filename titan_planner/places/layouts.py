"""The layouts of a run that unlike nodes can take, each as a Load of the search for places. No torch."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from titan_planner.places.network import Network, Sheet
from titan_planner.places.pipelines import Load, Pipelines, Plan
from titan_planner.plan.cost import Device, Layout, Machine, Rates
from titan_planner.plan.memory import in_arrays, sizes_of, staged, whole
from titan_planner.plan.search import FILLED, RECOMPUTES, Choice, Job, allowed, divisors
from torchtitan.hardware import PEAK_BF16_TFLOPS
from torchtitan.models.operations import Share, Work
from torchtitan.refusal import Refusal

_FLOPS_PER_BYTE = 200.0  # of memory, where a file gives no bandwidth: between A100's 153 and H100's 295
_INSIDE = 16.0  # GB/s between devices of a node, where a file gives none: half of PCIe 4 x16
_CLOSER, _LOOKED = 6, 300  # layouts that are searched a little; that are looked at once
_MANY = 100  # nodes, of which a plan uses a third at least; the search of more is shorter in proportion


@dataclass(frozen=True)
class Layouts:
    """A run on a network: what each layout asks of each node."""

    job: Job
    network: Network
    rates: Rates = field(default_factory=Rates)
    _seconds: dict[Any, np.ndarray] = field(default_factory=dict)

    def machines(self) -> dict[Sheet, Machine]:
        found = {}
        for name, sheet in zip(self.network.names, self.network.sheets, strict=True):
            tflops = sheet.tflops or PEAK_BF16_TFLOPS.get(sheet.kind)
            if not tflops or not sheet.memory_gib:
                lacks = "memory_gib" if tflops else f"tflops, and {sheet.kind} is no kind of the table of peaks"
                raise Refusal(f"node {name} has no {lacks}; give its group {lacks.split(',')[0]}")
            memory = sheet.memory_gbytes_per_second or tflops * 1e3 / _FLOPS_PER_BYTE
            inside = (sheet.inside_gbytes_per_second or _INSIDE) * 1e9
            device = Device(tflops * 1e12, memory * 1e9, inside, inside, self.network.per_node)
            found[sheet] = Machine(device, self.rates)
        return found

    def choices(self) -> Iterator[Choice]:
        """Every layout of 1F1B, and of one stage, that the trainer can run on some of the nodes."""
        job, nodes, each = self.job, len(self.network.regions), self.network.per_node
        layers = len(job.blueprint.layers)
        for tp in allowed(job, "tp", divisors(each)):
            if each % tp or not job.possible(tp, 1):
                continue
            for pp in allowed(job, "pp", range(1, min(nodes, layers) + 1)):
                for replicas in range(1 if nodes <= _MANY else nodes // pp // 3 + 1, nodes // pp + 1):
                    dp = replicas * each // tp
                    if job.global_batch % dp or dp not in allowed(job, "dp", [dp]):
                        continue
                    yield from self._batches(job.global_batch // dp, pp, dp, tp)

    def _batches(self, sequences: int, pp: int, dp: int, tp: int) -> Iterator[Choice]:
        job = self.job
        for recompute in allowed(job, "recompute", RECOMPUTES):
            for microbatch in allowed(job, "microbatch", [d for d in divisors(sequences) if d <= 8]):
                if sequences % microbatch:
                    continue
                count = sequences // microbatch
                if pp == 1:
                    if microbatch in allowed(job, "local_batch", [microbatch]):
                        yield Choice(1, 1, tp, 1, 1, dp, microbatch, count, 1, 1, recompute)
                    continue
                for passes in divisors(count):
                    each = count // passes
                    if each >= pp and each * microbatch in allowed(job, "local_batch", [each * microbatch]):
                        yield Choice(pp, 1, tp, 1, 1, dp, microbatch, each, passes, 0, recompute)

    def _asked(self, choice: Choice) -> tuple[Work, Layout]:
        job = self.job
        assert job.blueprint.spec.operations is not None
        share = Share(choice.microbatch, job.seq_len, choice.tp, 1)
        layout = Layout(
            dp=choice.dp, tp=choice.tp, pp=choice.pp, microbatches=choice.microbatches, passes=choice.passes,
            regathers=choice.regathers, recompute=choice.recompute, compiled=job.compiled, float8=job.float8,
            async_tp=job.async_tp, states=job.states,
        )  # fmt: skip
        return job.blueprint.spec.operations(job.blueprint.shape, share), layout

    def load(self, choice: Choice) -> Load:
        network, (work, layout) = self.network, self._asked(choice)
        seconds = self._of_nodes(work, layout, choice)
        layers, replicas = work.num_layers, choice.dp * choice.tp // network.per_node
        every = work.num_parameters + layers * work.layer.experts
        peak = self._peak(work, layout, choice)
        limits = FILLED * 2**30 * network.of("memory_gib", 0)
        most = {limit: (peak <= limit).sum(0) for limit in np.unique(limits)}
        once, spread = (
            work.layer.parameters + work.layer.experts,
            choice.tp / 1e9,
        )  # GB of all tensor-parallel ranks together
        return Load(
            choice.pp, replicas, layers,
            seconds[:, 0],
            seconds[:, 1],
            np.array([most[limit] for limit in limits]),
            sent=float(work.sent) * network.per_node / 1e9,
            exchanged=float((6 if choice.pp > 1 else 8) * once * spread),
            ends=(float(work.lookup / once), float(work.ends.parameters / once)),
            microbatches=choice.microbatches if choice.pp > 1 else 1,
            passes=choice.passes if choice.pp > 1 else choice.microbatches,
            update=max(
                float(machine.updating(every / choice.pp / choice.dp, layout.states))
                for machine in self.machines().values()
            ),
            beside=choice.pp == 1,
        )  # fmt: skip

    def _peak(self, work: Work, layout: Layout, choice: Choice) -> np.ndarray:
        """Bytes of a rank, by layers (row) and stage. A straight line between exact ones is never too low."""
        last, counts = choice.pp - 1, np.unique([1, (1 + work.num_layers) // 2, work.num_layers])
        if last == 0:
            return np.full((work.num_layers, 1), float(whole(work, in_arrays(layout)).peak[0]))
        layout, stages = in_arrays(layout, len(counts)), np.unique([0, min(1, last), max(0, last - 1), last])
        sized, layers, which = sizes_of(work, layout), [(int(count),) for count in counts], np.arange(len(counts))
        exact = np.array([staged(work, layout, sized, layers, which, int(stage)).peak for stage in stages])
        every = np.array([np.interp(np.arange(1, work.num_layers + 1), counts, peaks) for peaks in exact])
        return np.array([np.interp(np.arange(choice.pp), stages, peaks) for peaks in every.T])

    def memory(self, choice: Choice, layers: Sequence[int]) -> list[float]:
        """GiB of a rank of each stage."""
        peak = self._peak(*self._asked(choice), choice) / 2**30
        return [float(peak[count - 1, stage]) for stage, count in enumerate(layers)]

    def _of_nodes(self, work: Work, layout: Layout, choice: Choice) -> np.ndarray:
        """Seconds of a layer and of the output layer on each node; forward and backward of a microbatch."""
        key = choice.microbatch, choice.tp, choice.recompute
        if key not in self._seconds:
            plain = replace(layout, recompute="none")  # the output layer is not recomputed
            each = {
                sheet: (
                    sum(machine.block(work.layer, layout)) + 2 * self.rates.layer,
                    sum(machine.block(work.ends, plain)),
                )
                for sheet, machine in self.machines().items()
            }
            self._seconds[key] = np.array([each[sheet] for sheet in self.network.sheets], float)
        return self._seconds[key]

    def bound(self, load: Load) -> float:
        """No plan of this load takes less: the steady state alone, with nodes of like speed in each stage."""
        if load.most.max(1).clip(0).sum() < load.layers:
            return np.inf
        fastest = np.sort(load.layer)[: load.stages * load.replicas].reshape(load.stages, load.replicas)
        return float(load.passes * load.microbatches * load.layers / (1 / fastest[:, -1]).sum())


@dataclass(frozen=True)
class Found:
    choice: Choice
    load: Load
    plan: Plan


def propose(layouts: Layouts, seed: int, show: int, steps: int = 30_000) -> tuple[list[Found], int]:
    """The best layouts with their places, fastest first, and how many layouts there are.

    Each is bounded; the most promising are placed by regions, the best of those searched a little, the best two longer.
    """
    choices, loads, bounds = list(layouts.choices()), [], []
    fitting = set()
    for choice in choices:  # of passes, which take longer and hold less, only the fewest that may fit
        key = replace(choice, microbatches=0, passes=0)
        load = None if key in fitting else layouts.load(choice)
        loads.append(load)
        bounds.append(np.inf if load is None else layouts.bound(load))
        if bounds[-1] < np.inf and choice.pp > 1:
            fitting.add(key)
    looked: list[Found] = []
    scale = -(-len(layouts.network.regions) // _MANY)
    steps = steps // scale
    best = np.inf
    for number in np.argsort(bounds, kind="stable")[: _LOOKED // scale].tolist():
        load = loads[number]
        if load is None or bounds[number] > best or not np.isfinite(bounds[number]):
            break
        plan = Pipelines(layouts.network, load).search(seed, steps=0)
        if plan.fits:
            looked.append(Found(choices[number], load, plan))
            best = min(best, plan.seconds)
    for length, count in ((steps // 8, _CLOSER), (steps, 2)):
        looked = _distinct(sorted(looked, key=lambda found: found.plan.seconds))
        for place, found in enumerate(looked[:count]):
            better = Pipelines(layouts.network, found.load).search(seed, steps=length)
            if better.fits and better.seconds < found.plan.seconds:
                looked[place] = replace(found, plan=better)
    return sorted(looked, key=lambda found: found.plan.seconds)[:show], len(choices)


def _distinct(found: list[Found]) -> list[Found]:
    """The best of each number of stages, of replicas and of tensor-parallel ranks."""
    kept: dict[tuple[int, int, int], Found] = {}
    for one in found:
        kept.setdefault((one.choice.pp, one.choice.dp, one.choice.tp), one)
    return list(kept.values())
