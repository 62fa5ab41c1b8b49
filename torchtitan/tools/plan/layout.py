"""`python -m torchtitan plan CONFIG.toml --cluster FILE.toml`: the fastest layouts of a run, before it is paid for."""

import argparse
import json
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from torchtitan.config.layout import plan_batch, plan_layout
from torchtitan.config.load import ConfigError
from torchtitan.config.schema import Config
from torchtitan.models.families import load_run_or_exit, plan_model
from torchtitan.models.spec import Blueprint
from torchtitan.observe.planned import described
from torchtitan.refusal import Refusal
from torchtitan.tools.check import describe_configured
from torchtitan.tools.plan.choice import changed, fixed_keys, is_possible, left_out, to_text
from torchtitan.tools.plan.cluster import Cluster, read_cluster
from torchtitan.tools.plan.look import consists_of, operations
from torchtitan.tools.plan.search import FILLED, Answer, Choice, Job, Table, moved, search

_BAR = 30


def run(args: argparse.Namespace, options: Sequence[str]) -> tuple[Config, Job, Cluster, Answer]:
    began = time.perf_counter()
    cluster = read_cluster(args.cluster)
    config, blueprint = load_run_or_exit(["--job.config_file", args.file, *options], None, 0, prog="plan")
    if args.show < 1:
        raise Refusal(f"--show {args.show}: use 1 or more")
    job = job_of(config, blueprint, cluster.num_devices, options)
    answer = search(job, cluster, max(args.show, args.verify or 0))
    print(
        f"{config.job.description} on {cluster.name}: {job.global_batch} sequences of {job.seq_len:,} tokens a step\n"
        f"{describe_configured(blueprint, config)}\n"
        f"{answer.num_layouts:,} layouts, {answer.num_fitting:,} of them in {FILLED:.0%} of the memory, "
        f"{time.perf_counter() - began:.1f} s; rests on {cluster.rests_on}"
    )
    for line in left_out(config):
        print(f"not known: {line}")
    if not answer.best:
        least = min(float(table.peak.min()) for table in answer.tables) / 2**30 if answer.tables else 0
        raise Refusal(
            f"none of {answer.num_layouts:,} layouts fits {FILLED:.0%} of {cluster.memory_bytes / 2**30:.0f} GiB on "
            f"{cluster.num_devices} devices; the smallest needs {least:.1f}. Use more devices, or release keys after --"
        )
    print(_listing(job, cluster, answer))
    if args.explain:
        table, index, _ = _entry(answer, answer.best[0])
        print(_explained(job, answer))
        print(operations(job, cluster, table.choice(index), table.counts))
    if args.what_if:
        print(_what_if(job, cluster, answer))
    if args.schedules or args.drawing:
        _pipelines(job, cluster, answer, args.drawing)
    if args.out:
        _write(args.out, config, job, cluster, answer, [args.file, *options])
    return config, job, cluster, answer


def job_of(config: Config, blueprint: Blueprint, num_devices: int, options: Sequence[str]) -> Job:
    if blueprint.spec.operations is None:
        raise Refusal(
            f"{config.model.name} does not say what it computes; give its ModelSpec operations (docs/planner.md)"
        )
    if blueprint.shape.vocab_size is None:
        from torchtitan.data.tokenizer import build_tokenizer

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
    )


def _entry(answer: Answer, place: tuple[int, int]) -> tuple[Table, int, Choice]:
    table = answer.tables[place[0]]
    return table, place[1], table.choice(place[1])


def _listing(job: Job, cluster: Cluster, answer: Answer) -> str:
    """The best layouts, then the fastest ones that do not fit, each with what sets it apart from the best."""
    flops = job.blueprint.flops_per_token(job.seq_len) * job.global_batch * job.seq_len
    width = max(len(named(_entry(answer, place)[2])) for place in (*answer.best, *answer.too_large[:3]))
    lines = [f"     {'layout':<{width}}  s a step   tokens/s    MFU    GiB  instead of the first"]
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
            lines += [f"  {part / 2**30:19.3f}  {what}" for what, part in consists_of(name, kinds, kept) if part > 0]
        lines.append(f"{rank} moves in a step, in GiB:")
        lines += [f"  {size / 2**30:9.3f}  {name}" for name, size in traffic.items()]
    return "\n".join(lines)


def _what_if(job: Job, cluster: Cluster, answer: Answer) -> str:
    device = cluster.machine.device
    wider = replace(cluster.machine, device=replace(device, between=2 * device.between))
    others = {
        "twice the bandwidth between nodes": replace(cluster, machine=wider),
        "half the memory": replace(cluster, memory_bytes=cluster.memory_bytes / 2),
        "one node fewer": replace(cluster, num_devices=cluster.num_devices - device.per_node),
    }
    lines = ["what would change the answer:"]
    table, index, _ = _entry(answer, answer.best[0])
    for name, other in others.items():
        found = search(job, other, 1) if other.num_devices else None
        if found is None or not found.best:
            lines.append(f"  {name}: nothing fits, or the batch of {job.global_batch} does not divide")
            continue
        there, at, choice = _entry(found, found.best[0])
        change = float(there.total[at]) / float(table.total[index]) - 1
        lines.append(f"  {name}: {float(there.total[at]):.3f} s ({change:+.1%}), {named(choice)}")
    return "\n".join(lines)


def _pipelines(job: Job, cluster: Cluster, answer: Answer, drawing: Path | None) -> None:
    """The first listed layout that has a pipeline, simulated."""
    from torchtitan.tools.plan.look import draw
    from torchtitan.tools.plan.schedules import compare

    place = next((place for place in answer.best if _entry(answer, place)[2].pp > 1), None)
    if place is None:
        raise Refusal("no listed layout has a pipeline; use a larger --show, or fix pipeline_parallel_degree after --")
    table, _, choice = _entry(answer, place)
    runs = compare(job, cluster, choice, table.counts)
    print(f"one pass of {named(choice)}, simulated over torch's lists:")
    for run in runs:
        own = run.schedule == choice.schedule and run.stages_per_rank == choice.stages_per_rank
        print(
            f"  {run.timeline.seconds:9.3f} s  {run.idle:6.1%} idle  {run.waiting:6.0f} layers wait at most  "
            f"{run.schedule}, {run.stages_per_rank} a rank{', as above' * own}"
        )
        if own and drawing:
            draw(drawing, f"{job.blueprint.name}: {named(choice)}", run.timeline, run.hop)
            print(f"{drawing}: this pipeline over time")


def _write(path: Path, config: Config, job: Job, cluster: Cluster, answer: Answer, command: list[str]) -> None:
    """The best layout that `check` accepts, as a configuration of its own."""
    for place in answer.best:
        try:
            write_layout(path, config, job, cluster, answer, place, command)
        except ConfigError as error:
            print(f"{named(_entry(answer, place)[2])} is passed over: {error}", file=sys.stderr)
            continue
        print(f"{path}, {path.with_suffix('.json')}: {named(_entry(answer, place)[2])}")
        return
    raise Refusal(f"--out {path}: none of the {len(answer.best)} best layouts passes check; use a larger --show")


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
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        f"# {named(choice)}, on {cluster.name} ({cluster.num_devices} ranks).\n"
        f"# Predicted: {seconds:.3f} s a step, {peak:.1f} GiB; rests on {cluster.rests_on}.\n"
        f"# From: python -m torchtitan plan {shlex.join(command)} --cluster ...\n\n{text}",
        encoding="utf-8",
    )
    said = {
        "layout": named(choice),
        "seconds": seconds,
        "memory_gib": peak,
        "parts": _parts(answer, place),
        "moved_bytes": dict(zip(("first rank", "last rank"), moved(job, table, index), strict=False)),
        "rests_on": cluster.rests_on,
        "run": described(checked.model_dump()),
    }
    path.with_suffix(".json").write_text(json.dumps(said, indent=1) + "\n", encoding="utf-8")
    return said
