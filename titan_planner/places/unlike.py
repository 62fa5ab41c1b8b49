"""A plan for nodes or links that are unlike: the fastest layouts, and which node serves which stage."""

import argparse
import itertools
import sys
from collections.abc import Sequence
from dataclasses import replace
from html import escape
from pathlib import Path

import numpy as np

from titan_planner.places.layouts import Found, Layouts, propose
from titan_planner.places.network import Network, read_cluster_network
from titan_planner.places.pipelines import Load, Pipelines, Plan
from titan_planner.places.swarm import sites_of
from titan_planner.places.swarm import text as swarm_text
from titan_planner.plan.choice import changed, left_out, to_text
from titan_planner.plan.like import job_of, none_passes, write_plan
from titan_planner.plan.search import FILLED
from torchtitan.config.load import ConfigError
from torchtitan.config.schema import Config
from torchtitan.models.families import plan_model
from torchtitan.models.spec import Blueprint
from torchtitan.observe.planned import described
from torchtitan.refusal import Refusal

_COLORS = ("#6aa9e9", "#f0a860", "#8cc98c", "#d98cb3", "#b3a2e0", "#d0c060", "#7fcfcf", "#c0c0c0")
_NOT_SEARCHED = (
    ("cp", 1, "parallelism.context_parallel_degree"),
    ("replicas", 1, "parallelism.data_parallel_replicate_degree"),
    ("schedule", "1F1B", "parallelism.pipeline_parallel_schedule"),
)
_SHORT = 1000  # steps of a search of "what would change the answer"


class Unlike:
    """The fastest layouts on nodes or links that differ."""

    def __init__(self, args: argparse.Namespace, config: Config, blueprint: Blueprint, options: Sequence[str]) -> None:
        if (
            unknown := ["verify"] * (args.verify is not None)
            + ["schedules"] * bool(args.schedules)
            + ["each"] * bool(args.each)
        ):
            raise Refusal(f"--{unknown[0]} is for like nodes, but {args.cluster} has unlike ones; leave it out")
        self.name, network, self.rests_on = read_cluster_network(args.cluster)
        self.config, self.seed = config, args.seed
        self.num_devices = len(network.regions) * network.per_node
        self.job = job_of(config, blueprint, self.num_devices, options)
        for key, only, name in _NOT_SEARCHED:
            if self.job.fixed.get(key, only) != only:
                given = self.job.fixed[key]
                raise Refusal(f"{name} = {given} is not searched on unlike nodes; use {only}, or leave it out")
        self.network, notes = _completed(network)
        self.notes = [*left_out(config), *notes]
        self.layouts = Layouts(self.job, self.network)
        self.found, self.count = propose(self.layouts, args.seed, args.show)

    def counted(self) -> str:
        return f"{self.count:,} layouts on {len(self.network.regions)} nodes"

    def nothing_fits(self) -> str:
        return (
            f"none of {self.count:,} layouts fits {FILLED:.0%} of the memory of these {len(self.network.regions)} "
            "nodes; use more nodes, or release keys after --"
        )

    def listing(self) -> str:
        best = self.found[0]
        served = map_text(self.network, best.plan, *traffic(self.network, best.load, best.plan))
        return f"{_listing(self.layouts, self.found)}\n{served}"

    def explained(self) -> str:
        return _explained(self.layouts, self.found[0])

    def swarm(self, syncer: str, options: Sequence[str]) -> list[str]:
        """The regions as sites of a swarm, beside the best single run."""
        sites = sites_of(self.network, self.config, self.job.blueprint, options, syncer, self.seed)
        tokens = self.job.global_batch * self.job.seq_len
        together = tokens / self.seconds() if self.found else 0.0
        return swarm_text(sites, self.config, syncer, together, self.job.blueprint.num_parameters)

    def seconds(self) -> float:
        return self.found[0].plan.seconds

    def others(self) -> dict[str, Network]:
        """Other links, other memory, and the nodes without the slowest that is used."""
        network, best = self.network, self.found[0]
        slowest = best.plan.nodes[int(np.argmax([best.load.layer[list(nodes)].max() for nodes in best.plan.nodes]))]
        worst = max(slowest, key=lambda node: best.load.layer[node])
        halved = tuple(replace(sheet, memory_gib=(sheet.memory_gib or 0) / 2) for sheet in network.sheets)
        return {
            "twice the bandwidth of every link": replace(network, bandwidth=2 * network.bandwidth),
            "no delay": replace(network, delay=0 * network.delay),
            "half the memory": replace(network, sheets=halved),
            f"without {network.names[worst]}, the slowest that is used": network.without(worst),
        }

    def on(self, other: Network) -> tuple[float, str] | None:
        """Seconds and name of the fastest layout that a shorter search finds on another network."""
        found, _ = propose(Layouts(self.job, other), self.seed, 1, _SHORT)
        return (found[0].plan.seconds, _named(found[0])) if found else None

    def draw(self, drawing: Path | None, schedules: bool) -> None:
        if drawing is None:
            return
        best = self.found[0]
        drawing.parent.mkdir(parents=True, exist_ok=True)
        title = f"{self.job.blueprint.name} on {self.name}: {best.plan.seconds:.2f} s a step"
        svg = map_svg(title, self.network, best.plan, traffic(self.network, best.load, best.plan)[1])
        drawing.write_text(svg, encoding="utf-8")
        print(f"{drawing}: which node serves which stage, and what travels between sites")

    def write(self, path: Path, command: Sequence[str]) -> None:
        """The best layout that `check` accepts, as a configuration, and its nodes in the order of NODE_RANK."""
        network = self.network
        for found in self.found:
            plan, name = found.plan, _named(found)
            order = [network.names[node] for nodes in plan.nodes for node in nodes]
            counts = {len(plan.layers): plan.layers}
            planned = changed(self.config, found.choice, self.job, counts, path.with_suffix(".json").name)
            try:
                text, checked = to_text(planned, len(order) * network.per_node)
                plan_model(checked)
            except ConfigError as error:
                print(f"{name} is passed over: {error}", file=sys.stderr)
                continue
            gib = max(self.layouts.memory(found.choice, plan.layers))
            head = [
                f"{name}, on {len(order)} nodes of {self.name}.",
                f"Predicted: {plan.seconds:.3f} s a step, at most {gib:.1f} GiB; rests on {self.rests_on}.",
                f"NODE_RANK 0, 1, ... are the nodes {' '.join(order)}",
            ]
            said = {"layout": name, "seconds": plan.seconds, "memory_gib": gib, "parts": plan.parts}
            said |= {"rests_on": self.rests_on, "nodes": order, "run": described(checked.model_dump())}
            write_plan(path, head, command, text, said)
            path.with_suffix(".nodes").write_text("\n".join(order) + "\n", encoding="utf-8")
            print(f"{path}, {path.with_suffix('.nodes')}, {path.with_suffix('.json')}: {name}")
            return
        raise Refusal(none_passes(path, len(self.found)))


def _completed(network: Network) -> tuple[Network, list[str]]:
    """Ravnest's file says nothing of speed: all nodes count as alike then."""
    if all(sheet.tflops is None and sheet.kind == "device" for sheet in network.sheets):
        sheets = tuple(replace(sheet, tflops=10.0) for sheet in network.sheets)
        return replace(network, sheets=sheets), ["the speed of the devices: all are counted as of 10 TFLOP/s"]
    return network, []


def _named(found: Found) -> str:
    choice = found.choice
    axes = {"pp": choice.pp, "dp_shard": choice.dp, "tp": choice.tp}
    parts = [" x ".join(f"{name} {size}" for name, size in axes.items() if size > 1) or "1 rank"]
    if choice.pp > 1:
        parts.append(f"{choice.microbatches} microbatches of {choice.microbatch}")
        parts += [f"{choice.passes} passes"] * (choice.passes > 1)
        parts.append("layers " + "+".join(map(str, found.plan.layers)))
    else:
        parts.append(f"{choice.microbatches} local batch{'es' * (choice.microbatches > 1)} of {choice.microbatch}")
    return ", ".join([*parts, "recompute " + choice.recompute])


def _listing(layouts: Layouts, found: Sequence[Found]) -> str:
    job, network, machines = layouts.job, layouts.network, layouts.machines()
    width = max(len(_named(one)) for one in found)
    lines = [
        f"     {'layout':<{width}}  nodes  s a step  tokens/s    MFU    GiB      fill    steady  exchange  optimizer"
    ]
    tokens = job.global_batch * job.seq_len
    for number, one in enumerate(found, 1):
        plan, used = one.plan, [node for nodes in one.plan.nodes for node in nodes]
        peak = sum(machines[network.sheets[node]].device.flops * network.per_node for node in used)
        mfu = job.blueprint.flops_per_token(job.seq_len) * tokens / plan.seconds / peak
        parts = " ".join(f"{seconds:9.3f}" for seconds in plan.parts.values())
        lines.append(
            f"{number:>4} {_named(one):<{width}} {len(used):6} {plan.seconds:9.3f} {tokens / plan.seconds:9,.0f} "
            f"{mfu:6.1%} {max(layouts.memory(one.choice, plan.layers)):6.1f} {parts}"
        )
    return "\n".join(lines)


def _explained(layouts: Layouts, found: Found) -> str:
    """What each stage computes, sends, exchanges and holds, by its slowest node and link and its smallest memory."""
    network, load, plan = layouts.network, found.load, found.plan
    pipelines, layers = Pipelines(network, load), np.array(plan.layers)
    stages = pipelines.stages(np.array(plan.nodes).reshape(-1, 1))
    computed = stages.layer[:, 0] * layers
    computed[-1] += stages.last[0]
    exchanged = pipelines.exchanged(stages, layers[:, None])[:, 0]
    limits, held = FILLED * network.of("memory_gib", 0), layouts.memory(found.choice, plan.layers)
    lines = [
        "the best layout: seconds of a microbatch, there and back; of an exchange; GiB of a rank",
        "  stage  layers  computes  sends on  exchanges     GiB   of at most  slowest node",
    ]
    for stage, nodes in enumerate(plan.nodes):
        sent = stages.hop[stage, 0] if stage < len(stages.hop) else 0
        slowest = network.names[max(nodes, key=lambda node: load.layer[node])]
        lines.append(
            f"  {stage:5} {layers[stage]:7} {computed[stage]:9.3f} {sent:9.3f} {exchanged[stage]:10.3f} "
            f"{held[stage]:7.1f} {min(limits[list(nodes)]):12.1f}  {slowest}"
        )
    return "\n".join(lines)


def traffic(network: Network, load: Load, plan: Plan) -> tuple[np.ndarray, dict[tuple[str, str], float]]:
    """GB of a step that each stage sends the next, and back; and what travels between each two regions."""
    between: dict[tuple[str, str], float] = {}

    def add(one: int, other: int, gigabytes: float) -> None:
        names = sorted((network.regions[one], network.regions[other]))
        if names[0] != names[1] and gigabytes:
            between[names[0], names[1]] = between.get((names[0], names[1]), 0.0) + gigabytes

    message = 2 * load.sent * load.microbatches * load.passes
    for here, there in itertools.pairwise(plan.nodes):
        for one, other in zip(here, there, strict=True):
            add(one, other, message)
    extra = [load.ends[0] * (s == 0) + load.ends[1] * (s == load.stages - 1) for s in range(load.stages)]
    for nodes, layers, more in zip(plan.nodes, plan.layers, extra, strict=True):
        ring = load.passes / load.every * load.exchanged * (layers + more) * (load.replicas - 1) / load.replicas
        for place, one in enumerate(nodes):
            add(one, nodes[(place + 1) % len(nodes)], ring)
    return np.full(load.stages - 1, message * load.replicas), between


def map_text(network: Network, plan: Plan, hops: np.ndarray, between: dict[tuple[str, str], float]) -> str:
    """Which nodes serve each stage, in the order of replicas, and the GB of a step between regions."""
    lines = ["which node serves which stage, in the order of ranks:"]
    for stage, (nodes, layers) in enumerate(zip(plan.nodes, plan.layers, strict=True)):
        names = " ".join(network.names[node] for node in nodes[:16]) + (" ..." if len(nodes) > 16 else "")
        sent = f", sends {hops[stage]:.2f} GB on" if stage < len(hops) else ""
        lines.append(f"  stage {stage}: {layers} layer{'s' * (layers != 1)} on {names}{sent}")
    used = {node for nodes in plan.nodes for node in nodes}
    if left := [name for node, name in enumerate(network.names) if node not in used]:
        lines.append(f"  not used: {' '.join(left[:16])}{' ...' * (len(left) > 16)}")
    if between:
        lines.append("between regions, GB a step, both directions:")
    largest = sorted(between.items(), key=lambda item: (-item[1], item[0]))
    lines += [f"  {gb:9.2f}  {one} - {other}" for (one, other), gb in largest[:12]]
    if len(largest) > 12:
        lines.append(f"  {sum(gb for _, gb in largest[12:]):9.2f}  {len(largest) - 12} other pairs")
    return "\n".join(lines)


def map_svg(title: str, network: Network, plan: Plan, between: dict[tuple[str, str], float]) -> str:
    """Regions on a circle, a dot for each node in its stage's colour, and lines as thick as what travels."""
    regions = list(dict.fromkeys(network.regions))
    angles = 2 * np.pi * np.arange(len(regions)) / max(1, len(regions))
    middle, far = (480, 430), 330 if len(regions) > 1 else 0
    places = {
        name: (middle[0] + far * np.cos(a), middle[1] + far * np.sin(a))
        for name, a in zip(regions, angles, strict=True)
    }
    lines = [
        '<svg xmlns="http://www.w3.org/2000/svg" width="1180" height="860" font-family="sans-serif" font-size="12">'
        f'<rect width="100%" height="100%" fill="white"/><text x="10" y="20">{escape(title)}</text>'
    ]
    most = max(between.values(), default=1.0)
    for (one, other), gigabytes in sorted(between.items(), key=lambda item: item[1]):
        (x, y), (u, v) = places[one], places[other]
        width = 0.5 + 9 * gigabytes / most
        lines.append(
            f'<line x1="{x:.0f}" y1="{y:.0f}" x2="{u:.0f}" y2="{v:.0f}" stroke="#999" stroke-opacity="0.5" '
            f'stroke-width="{width:.1f}"><title>{escape(f"{one} - {other}: {gigabytes:.2f} GB a step")}</title></line>'
        )
    stage_of = {node: stage for stage, nodes in enumerate(plan.nodes) for node in nodes}
    seen = dict.fromkeys(regions, 0)
    for node, region in enumerate(network.regions):
        number, stage = seen[region], stage_of.get(node)
        seen[region] += 1
        x, y = places[region][0] + 16 * (number % 6) - 40, places[region][1] + 16 * (number // 6)
        color = "white" if stage is None else _COLORS[stage % len(_COLORS)]
        said = f"{network.names[node]}: " + ("not used" if stage is None else f"stage {stage}")
        lines.append(
            f'<circle cx="{x:.0f}" cy="{y:.0f}" r="7" fill="{color}" stroke="#444"><title>{escape(said)}</title>'
            f'</circle><text x="{x:.0f}" y="{y + 4:.0f}" font-size="8" text-anchor="middle">'
            f"{'' if stage is None else stage}</text>"
        )
    lines += [
        f'<text x="{x - 46:.0f}" y="{y - 12:.0f}">{escape(name)}</text>'
        for name, (x, y) in places.items()
        if len(places) <= 64
    ]
    for stage, layers in enumerate(plan.layers[:48]):
        y = 40 + 17 * stage
        lines.append(f'<circle cx="960" cy="{y - 4}" r="6" fill="{_COLORS[stage % len(_COLORS)]}" stroke="#444"/>')
        lines.append(f'<text x="972" y="{y}">stage {stage}: {layers} layers, {len(plan.nodes[stage])} nodes</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"
