"""A plan for nodes that are alike: the fastest layouts, what they consist of, and the best as a configuration."""

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from titan_planner.plan.choice import changed, fixed_keys, is_possible, left_out, to_text
from titan_planner.plan.cluster import Cluster, read_cluster
from titan_planner.plan.look import consists_of, operations
from titan_planner.plan.search import FILLED, Answer, Choice, Job, Table, moved, search
from torchtitan.config.layout import plan_batch, plan_layout
from torchtitan.config.load import ConfigError
from torchtitan.config.schema import Config
from torchtitan.models.families import plan_model
from torchtitan.models.spec import Blueprint
from torchtitan.observe.planned import described
from torchtitan.refusal import Refusal

if TYPE_CHECKING:
    from titan_planner.plan.pipeline.schedules import ScheduledPass

_BAR = 30


class Like:
    """The fastest layouts on nodes that are alike."""

    def __init__(self, args: argparse.Namespace, config: Config, blueprint: Blueprint, options: Sequence[str]) -> None:
        self.config, self.cluster = config, read_cluster(args.cluster)
        self.name, self.rests_on, self.notes = self.cluster.name, self.cluster.rests_on, left_out(config)
        self.num_devices = self.cluster.num_devices
        self.job = job_of(config, blueprint, self.cluster.num_devices, options)
        self.answer = search(self.job, self.cluster, max(args.show, args.verify or 0))
        self.found = self.answer.best

    def counted(self) -> str:
        answer = self.answer
        return f"{answer.num_layouts:,} layouts, {answer.num_fitting:,} of them in {FILLED:.0%} of the memory"

    def nothing_fits(self) -> str:
        answer, cluster = self.answer, self.cluster
        least = min(float(table.peak.min()) for table in answer.tables) / 2**30 if answer.tables else 0
        return (
            f"none of {answer.num_layouts:,} layouts fits {FILLED:.0%} of {cluster.memory_bytes / 2**30:.0f} GiB on "
            f"{cluster.num_devices} devices; the smallest needs {least:.1f}. Use more devices, or release keys after --"
        )

    def listing(self) -> str:
        return _listing(self.job, self.cluster, self.answer)

    def swarm(self, syncer: str, options: Sequence[str]) -> list[str]:
        raise Refusal(f"--swarm {syncer} needs a file of regions with links between them, and this one has like nodes")

    def explained(self) -> str:
        table, index, _ = _entry(self.answer, self.answer.best[0])
        parts = operations(self.job, self.cluster, table.choice(index), table.counts)
        return f"{_explained(self.job, self.answer)}\n{parts}"

    def seconds(self) -> float:
        table, index, _ = _entry(self.answer, self.answer.best[0])
        return float(table.total[index])

    def others(self) -> dict[str, Cluster]:
        """Machines that would change the answer."""
        cluster, device = self.cluster, self.cluster.machine.device
        wider = replace(cluster.machine, device=replace(device, between=2 * device.between))
        return {
            "twice the bandwidth between nodes": replace(cluster, machine=wider),
            "half the memory": replace(cluster, memory_bytes=cluster.memory_bytes / 2),
            "one node fewer": replace(cluster, num_devices=cluster.num_devices - device.per_node),
        }

    def on(self, other: Cluster) -> tuple[float, str] | None:
        """Seconds and name of the fastest layout on other machines."""
        found = search(self.job, other, 1) if other.num_devices else None
        if found is None or not found.best:
            return None
        table, at, choice = _entry(found, found.best[0])
        return float(table.total[at]), named(choice)

    def draw(self, drawing: Path | None, schedules: bool) -> None:
        if schedules or drawing:
            _pipelines(self.job, self.cluster, self.answer, drawing)

    def write(self, path: Path, command: Sequence[str]) -> None:
        """The best layout that `check` accepts, as a configuration of its own."""
        for place in self.answer.best:
            name = named(_entry(self.answer, place)[2])
            try:
                write_layout(path, self.config, self.job, self.cluster, self.answer, place, command)
            except ConfigError as error:
                print(f"{name} is passed over: {error}", file=sys.stderr)
                continue
            print(f"{path}, {path.with_suffix('.json')}: {name}")
            return
        raise Refusal(none_passes(path, len(self.answer.best)))

    def write_each(self, folder: Path, command: Sequence[str]) -> None:
        """Every listed layout that `check` accepts, by its number in the list; a pipeline with its drawing."""
        from titan_planner.plan.look import draw
        from titan_planner.plan.pipeline.schedules import compare

        for number, place in enumerate(self.answer.best, 1):
            table, _, choice = _entry(self.answer, place)
            path = folder / f"{number}.toml"
            try:
                write_layout(path, self.config, self.job, self.cluster, self.answer, place, command)
            except ConfigError as error:
                print(f"{named(choice)} is passed over: {error}", file=sys.stderr)
                continue
            if choice.pp > 1:
                runs = compare(self.job, self.cluster, choice, table.counts)
                own = next(run for run in runs if _is_own(run, choice))
                draw(path.with_suffix(".svg"), f"{self.job.blueprint.name}: {named(choice)}", own.timeline, own.hop)


def job_of(config: Config, blueprint: Blueprint, num_devices: int, options: Sequence[str]) -> Job:
    if not blueprint.reads_text or blueprint.spec.operations is None:
        raise Refusal(
            f"model.name = {config.model.name} does not say what it computes, and the planner predicts families that "
            "do (operations of a Family, docs/recipe/models.md); for another model, use dry_run for the memory of a "
            "layout, and compare for the speed of two"
        )
    if blueprint.shape.vocab_size is None:
        from torchtitan.data.tokenizers.tokenizer import build_tokenizer

        blueprint = blueprint.with_vocabulary(build_tokenizer(config.model.hf_assets_path).vocab_size)
    batch = config.training.global_batch_size
    if batch == -1:
        try:
            batch = plan_batch(config.training, plan_layout(config.parallelism, num_devices).dp).global_batch_size
        except Refusal as error:
            raise Refusal(f"{error}; or say training.global_batch_size, which every layout keeps") from None
    return Job(
        blueprint,
        batch,
        config.training.seq_len,
        config.compile.model,
        config.float8 is not None,
        config.parallelism.enable_async_tensor_parallel,
        lambda tp, cp: is_possible(config, blueprint, tp, cp),
        fixed_keys(config, options),
        2.0 if config.training.mixed_precision_param == "float32" else 1.0,
        4.0 if config.optimizer.moments_dtype == "bfloat16" else 8.0,
    )


def _entry(answer: Answer, place: tuple[int, int]) -> tuple[Table, int, Choice]:
    table = answer.tables[place[0]]
    return table, place[1], table.choice(place[1])


def _listing(job: Job, cluster: Cluster, answer: Answer) -> str:
    """The best layouts, then the fastest ones that do not fit, each with what sets it apart from the best."""
    flops = job.blueprint.flops_per_token(job.seq_len) * job.global_batch * job.seq_len
    width = max(len(named(_entry(answer, place)[2])) for place in (*answer.best, *answer.too_large[:3]))
    lines = [f"     {'layout':<{width}}  s a step   tokens/s    MFU    GiB  slower than no. 1, because of"]
    for number, place in enumerate((*answer.best, *answer.too_large[:3])):
        table, index, choice = _entry(answer, place)
        seconds, peak = float(table.total[index]), float(table.peak[index]) / 2**30
        fits = number < len(answer.best)
        reason = "" if number == 0 else _reason(answer, place) if fits else f"needs {peak:.0f} GiB"
        speed = job.global_batch * job.seq_len / seconds
        mfu = flops / seconds / cluster.num_devices / cluster.machine.device.flops
        mark = str(number + 1) if fits else "-"
        lines.append(
            f"{mark:>4} {named(choice):<{width}} {seconds:9.3f} {speed:10,.0f} {mfu:6.1%} {peak:6.1f}  {reason}"
        )
    return "\n".join(lines)


def named(choice: Choice) -> str:
    axes = {"pp": choice.pp, "dp_replicate": choice.replicas, "dp_shard": choice.dp, "cp": choice.cp, "tp": choice.tp}
    axes["ep"] = choice.ep
    parts = [" x ".join(f"{name} {size}" for name, size in axes.items() if size > 1) or "1 rank"]
    if choice.pp > 1:
        parts.append(f"{choice.schedule}, {choice.stages_per_rank} stages" if choice.stages_per_rank > 1 else "1F1B")
        parts.append(f"{choice.microbatches} microbatches of {choice.microbatch}")
        parts += [f"{choice.passes} passes"] * (choice.passes > 1)
    else:
        parts.append(f"{choice.microbatches} local batch{'es' * (choice.microbatches > 1)} of {choice.microbatch}")
        parts += ["weights stay"] * (choice.regathers == 0)
    return ", ".join([*parts, "recompute " + choice.recompute])


def _reason(answer: Answer, place: tuple[int, int]) -> str:
    """The part of the step that is longer than the best layout's by most."""
    parts, best = _parts(answer, place), _parts(answer, answer.best[0])
    name = max(parts, key=lambda name: parts[name] - best[name])
    return f"{parts[name] - best[name]:+.3f} s: {name}"


def _parts(answer: Answer, place: tuple[int, int]) -> dict[str, float]:
    table, index, _ = _entry(answer, place)
    shape = table.total.shape
    return {name: float(np.broadcast_to(part, shape)[index]) for name, part in table.seconds.parts.items()}


def _explained(job: Job, answer: Answer) -> str:
    table, index, _ = _entry(answer, answer.best[0])
    parts = _parts(answer, answer.best[0])
    total = sum(parts.values())
    lines = ["the best step, in seconds:"]
    for name, seconds in parts.items():
        lines.append(f"  {seconds:9.3f}  {name:<36} {'█' * round(_BAR * seconds / total)}")
    ranks = ("every rank",) if len(table.held) == 1 else ("the first rank", "the last rank")
    for held, traffic, rank in zip(table.held, moved(job, table, index), ranks, strict=True):
        moment, kinds = held.at(index)
        whole = sum(kinds.values())
        lines.append(f"{rank} holds most during {moment}, in GiB:")
        kept = table.kept_of_a_layer(index)
        for name, size in kinds.items():
            lines.append(f"  {size / 2**30:9.3f}  {name:<36} {'█' * round(_BAR * size / whole)}")
            of_kind = consists_of(name, kinds, kept, job.states)
            lines += [f"  {part / 2**30:19.3f}  {what}" for what, part in of_kind if part > 0]
        lines.append(f"{rank} moves in a step, in GiB:")
        lines += [f"  {size / 2**30:9.3f}  {name}" for name, size in traffic.items()]
    return "\n".join(lines)


def _pipelines(job: Job, cluster: Cluster, answer: Answer, drawing: Path | None) -> None:
    """The first listed layout that has a pipeline, simulated."""
    from titan_planner.plan.look import draw
    from titan_planner.plan.pipeline.schedules import compare

    place = next((place for place in answer.best if _entry(answer, place)[2].pp > 1), None)
    if place is None:
        raise Refusal("no listed layout has a pipeline; use a larger --show, or fix pipeline_parallel_degree after --")
    table, _, choice = _entry(answer, place)
    runs = compare(job, cluster, choice, table.counts)
    print(f"one pass of {named(choice)}, simulated over torch's lists:")
    for run in runs:
        own = _is_own(run, choice)
        print(
            f"  {run.timeline.seconds:9.3f} s  {run.idle:6.1%} idle  {run.waiting:6.0f} layers wait at most  "
            f"{run.schedule}, {run.stages_per_rank} a rank{', as above' * own}"
        )
        if own and drawing:
            draw(drawing, f"{job.blueprint.name}: {named(choice)}", run.timeline, run.hop)
            print(f"{drawing}: this pipeline over time")


def _is_own(run: "ScheduledPass", choice: Choice) -> bool:
    return run.schedule == choice.schedule and run.stages_per_rank == choice.stages_per_rank


def write_layout(
    path: Path,
    config: Config,
    job: Job,
    cluster: Cluster,
    answer: Answer,
    place: tuple[int, int],
    command: Sequence[str],
) -> dict[str, Any]:
    """A layout as a configuration, and its prediction beside it; raises ConfigError if `check` refuses it."""
    table, index, choice = _entry(answer, place)
    planned = changed(config, choice, job, table.counts, path.with_suffix(".json").name)
    text, checked = to_text(planned, cluster.num_devices)
    plan_model(checked)
    seconds, peak = float(table.total[index]), float(table.peak[index]) / 2**30
    said = {
        "layout": named(choice),
        "seconds": seconds,
        "memory_gib": peak,
        "parts": _parts(answer, place),
        "moved_bytes": dict(zip(("first rank", "last rank"), moved(job, table, index), strict=False)),
        "rests_on": cluster.rests_on,
        "run": described(checked.model_dump()),
    }
    head = [
        f"{named(choice)}, on {cluster.name} ({cluster.num_devices} ranks).",
        f"Predicted: {seconds:.3f} s a step, {peak:.1f} GiB; rests on {cluster.rests_on}.",
    ]
    write_plan(path, head, command, text, said)
    return said


def none_passes(path: Path, best: int) -> str:
    return f"--out {path}: none of the {best} best layouts passes check; use a larger --show"


def write_plan(path: Path, head: Sequence[str], command: Sequence[str], text: str, said: dict[str, Any]) -> None:
    """A configuration under comments that say where it comes from, and its prediction beside it."""
    lines = [*head, f"From: python -m torchtitan plan {shlex.join(command)} --cluster ..."]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"# {line}\n" for line in lines) + f"\n{text}", encoding="utf-8")
    path.with_suffix(".json").write_text(json.dumps(said, indent=1) + "\n", encoding="utf-8")
