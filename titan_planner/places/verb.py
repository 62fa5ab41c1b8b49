"""`plan place FILE`: which node serves which stage of a fixed pipeline, by DT-FM's cost, our own, or Ravnest's."""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from titan_planner.places.network import Network
from titan_planner.places.pipelines import Load, Pipelines, Plan
from titan_planner.places.placement import FixedPipeline, Placement, read_networks
from titan_planner.places.ravnest import (
    MOST_CLUSTERS,
    Provider,
    form_clusters,
    ravnest_cost,
    read_providers,
    rewarded_cost,
    spread,
)
from titan_planner.places.unlike import map_svg, map_text, traffic
from torchtitan.refusal import Refusal

_DRAWN = 20  # random placements
HELP = "decide which device serves which pipeline stage on unlike links"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, metavar="FILE", help="Read networks (TOML) or Ravnest's node_configs.json")
    parser.add_argument("--model_gb", type=float, help="Form Ravnest's clusters for a model of this many GB")
    parser.add_argument(
        "--objective",
        choices=("all", "dtfm", "ours", "ravnest"),
        default="all",
        help="Minimize DT-FM's cost, our own, or form Ravnest's clusters (default: the first two)",
    )
    parser.add_argument("--drawing", type=Path, metavar="FILE.svg", help="Draw the first network's map of stages")
    parser.add_argument("--seed", type=int, default=0, help="Change it to search anew (default: %(default)s)")
    parser.add_argument(
        "--restarts",
        type=int,
        default=1,
        help="Random starts of a search by DT-FM's cost (default: %(default)s)",
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=4000,
        help="Steps of a search; by our objective 25 times as many (default: %(default)s)",
    )


def run(args: argparse.Namespace, _: Sequence[str]) -> None:
    if args.file.suffix == ".json":
        _clusters(args, read_providers(args.file))
        return
    job, networks = read_networks(args.file)
    for number, (name, network, said) in enumerate(networks):
        if args.objective == "ravnest":
            print(name)
            _clusters(args, _providers(network))
            continue
        placed = _dtfm(args, job, name, network, said) if args.objective != "ours" else None
        if args.objective == "dtfm":
            continue
        plan = _ours(args, job, name, network, placed)
        if args.drawing and number == 0:
            args.drawing.parent.mkdir(parents=True, exist_ok=True)
            between = traffic(network, load_of(job, network), plan)[1]
            args.drawing.write_text(map_svg(f"{name}: {plan.seconds:.2f} s", network, plan, between), encoding="utf-8")
            print(f"{args.drawing}: which node serves which stage")


def load_of(job: FixedPipeline, network: Network) -> Load:
    """The load of a file of networks. Nodes without TFLOP/s compute in no time; those without memory hold all."""
    layers = job.layers or job.num_stages
    seconds = job.layer_tflop / network.of("tflops", np.inf)
    waiting = np.minimum(job.microbatches, job.num_stages - np.arange(job.num_stages))
    of_layer = np.maximum(job.layer_gib + job.waiting_gib * waiting, 1e-12)
    most = np.minimum(network.of("memory_gib", np.inf)[:, None] / of_layer, layers).astype(int)
    sent, of_layers = job.activations / job.microbatches, job.gradients * job.num_stages / layers
    return Load(
        job.num_stages, job.per_stage, layers, seconds, 0 * seconds, most, sent, 2 * of_layers,
        microbatches=job.microbatches, overlap=job.overlap, every=job.exchange_every,
    )  # fmt: skip


def _dtfm(args: argparse.Namespace, job: FixedPipeline, name: str, network: Network, said: Mapping) -> np.ndarray:
    placement, chance = Placement(network, job), np.random.default_rng(args.seed)
    drawn = [placement.cost(placement.random(chance)) for _ in range(_DRAWN)]
    found = placement.search(args.seed, args.steps, args.restarts)
    listed = placement.cost(np.arange(len(network.regions)).reshape(job.num_stages, -1))
    known = f", best known {said['best_known']:.2f}" if "best_known" in said else ""
    print(f"{name}: {found.cost:.2f} s a step; as listed {listed:.2f}, random {np.mean(drawn):.2f}{known}")
    for number, stage in enumerate(found.stages):
        regions = [network.regions[device] for device in stage]
        counts = ", ".join(f"{regions.count(region)} {region}" for region in dict.fromkeys(sorted(regions)))
        print(f"  stage {number}: devices {' '.join(map(str, sorted(stage)))} ({counts})")
    return np.array(found.stages).ravel()


def _ours(args: argparse.Namespace, job: FixedPipeline, name: str, network: Network, placed: np.ndarray | None) -> Plan:
    pipelines, chance = Pipelines(network, load_of(job, network)), np.random.default_rng(args.seed)
    also = [order.ravel() for order in Placement(network, job).starts()] + ([] if placed is None else [placed])
    found = pipelines.search(args.seed, 25 * args.steps, also=also)
    if not found.fits:
        raise Refusal(f"{name}: no placement was found whose layers fit the memory; use more stages or larger nodes")

    def of(order: np.ndarray) -> str:
        plan = pipelines.plan(order, pipelines.split(order))
        return f"{plan.seconds:.2f}" if plan.fits else "beyond the memory"

    count = len(network.regions)
    plans = [
        pipelines.plan(order, pipelines.split(order)) for order in (chance.permutation(count) for _ in range(_DRAWN))
    ]
    fitting = [plan.seconds for plan in plans if plan.fits]
    drawn = f"{np.mean(fitting):.2f}" if fitting else "never in the memory"
    others = [f"as listed {of(np.arange(count))}", f"random {drawn}"]
    others += [] if placed is None else [f"DT-FM's placement {of(placed)}"]
    parts = ", ".join(f"{part} {seconds:.2f}" for part, seconds in found.parts.items() if seconds)
    print(f"{name}, by our objective: {found.seconds:.2f} s a step ({parts}); {', '.join(others)}")
    print(map_text(network, found, *traffic(network, pipelines.load, found)))
    return found


def _providers(network: Network) -> list[Provider]:
    """As Ravnest sees nodes: memory, and one bandwidth, that of the fastest link."""
    if not all(sheet.memory_gib for sheet in network.sheets):
        raise Refusal("Ravnest's objective needs memory_gib of every node; give it to each group, or as a list")
    links = np.where(np.isfinite(network.bandwidth), network.bandwidth, 0).max(1) * 1e3
    return [
        Provider(name, int((sheet.memory_gib or 0) * 1024), max(1, int(megabits)))
        for name, sheet, megabits in zip(network.names, network.sheets, links, strict=True)
    ]


def _clusters(args: argparse.Namespace, providers: Sequence[Provider]) -> None:
    if args.model_gb is None:
        raise Refusal(f"{args.file} has providers; say with --model_gb how much memory the model needs")
    size = args.model_gb * 1024
    clusters = form_clusters(providers, size)
    print(
        f"{len(clusters)} clusters, each of which holds the model; Ravnest's cost {ravnest_cost(clusters, size):,.0f}"
    )
    for number, cluster in enumerate(clusters):
        memory = sum(provider.megabytes for provider in cluster) / 1024
        print(f"  cluster {number}: {memory:.0f} GB, nodes {', '.join(sorted((p.name for p in cluster), key=str))}")
    print("clusters  Ravnest's cost  seconds of the slowest, over their number")
    for count in range(1, min(MOST_CLUSTERS, len(providers)) + 1):
        some = spread(providers, count, size)
        print(f"{count:8}  {ravnest_cost(some, size):14,.0f}  {rewarded_cost(some, size):14,.0f}")
