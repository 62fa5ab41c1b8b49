"""`python -m torchtitan plan`: propose layouts, predict published runs (`rows`), put stages on a network (`place`)."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from torchtitan.refusal import Refusal


def add_arguments(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="what", required=True)
    layout = verbs.add_parser("layout", help="the fastest layouts of a run; this word may be left out")
    layout.add_argument("file", metavar="CONFIG.toml", help="the run; its layout is what is searched")
    layout.add_argument("--cluster", type=Path, required=True, metavar="FILE.toml", help="the machines (clusters/)")
    layout.add_argument("--show", type=int, default=8, metavar="N", help="layouts to list (default: %(default)s)")
    layout.add_argument("--explain", action="store_true", help="what the best step and its memory are made of")
    layout.add_argument("--what_if", action="store_true", help="the answer with other links, memory, or a node fewer")
    layout.add_argument("--schedules", action="store_true", help="simulate the best pipeline under torch's schedules")
    layout.add_argument("--drawing", type=Path, metavar="FILE", help="SVG or PNG: draw the best pipeline over time")
    layout.add_argument("--out", type=Path, metavar="PLAN.toml", help="write the best as a configuration to train with")
    layout.add_argument("--verify", type=int, metavar="K", help="run the best K and some others on this machine")
    layout.add_argument("--others", type=int, default=5, help="that --verify runs, too (default: %(default)s)")
    layout.add_argument("--repeats", type=int, default=1, help="runs of each (default: %(default)s)")
    layout.add_argument("--steps", type=int, default=8, help="of such a run (default: %(default)s)")
    layout.add_argument("--minutes", type=float, default=20, help="that --verify may take (default: %(default)s)")
    layout.add_argument("--seed", type=int, default=0, help="of the others' draw and of the order (default: 0)")
    layout.add_argument("--runs", type=Path, default=Path("outputs/verify"), metavar="FOLDER", help="of --verify")
    layout.epilog = "After --: options of train.py; keys of the layout that are given there stay as they are."

    measured = verbs.add_parser("measured", help="what a plan predicted beside what its run measured")
    measured.add_argument("run", type=Path, help="the run folder")
    measured.add_argument("--plan", type=Path, required=True, metavar="PLAN.json", help="what --out wrote")

    rows = verbs.add_parser("rows", help="predict the runs of a file, and compare with what was measured")
    rows.add_argument("file", type=Path, metavar="FILE.toml")
    rows.add_argument("--fit", default="", metavar="ID,ID", help="rows on which rates are fitted (default: none)")
    rows.add_argument("--rates", type=int, default=2, metavar="N", help="how many are, at most (default: %(default)s)")
    rows.add_argument("--leave_out", default="", metavar="ID,ID", help="rows that are not looked at")
    rows.add_argument("--explain", action="store_true", help="show what each step is made of")

    place = verbs.add_parser("place", help="which device serves which pipeline stage, on a network of unlike links")
    place.add_argument("file", type=Path, metavar="FILE", help="networks as TOML, or Ravnest's node_configs.json")
    place.add_argument("--model_gb", type=float, help="memory that the model needs, for Ravnest's clusters")
    place.add_argument("--seed", type=int, default=0, help="of the search (default: %(default)s)")
    place.add_argument("--restarts", type=int, default=2, help="from random placements (default: %(default)s)")


def run(args: argparse.Namespace, options: Sequence[str]) -> None:
    if args.what == "layout":
        from torchtitan.verbs import plan_layout

        plan_layout.run(args, options)
    elif args.what == "measured":
        from torchtitan.observe.planned import report
        from torchtitan.verbs.runs import read_config

        print(report(args.run, args.plan, read_config(args.run)))
    elif args.what == "rows":
        from torchtitan.verbs import plan_rows

        plan_rows.run(args)
    elif args.file.suffix == ".json":
        _clusters(args)
    else:
        _place(args)


def _place(args: argparse.Namespace) -> None:
    import numpy as np

    from torchtitan.planner.placement import Placement, read_networks

    job, networks = read_networks(args.file)
    for name, network, said in networks:
        placement, chance = Placement(network, job), np.random.default_rng(args.seed)
        drawn = [placement.cost(placement.random(chance)) for _ in range(20)]
        found = placement.search(args.seed, restarts=args.restarts)
        listed = placement.cost(np.arange(len(network.regions)).reshape(job.num_stages, -1))
        known = f", best known {said['best_known']:.2f}" if "best_known" in said else ""
        print(f"{name}: {found.cost:.2f} s a step; as listed {listed:.2f}, random {np.mean(drawn):.2f}{known}")
        for number, stage in enumerate(found.stages):
            regions = [network.regions[device] for device in stage]
            counts = ", ".join(f"{regions.count(region)} {region}" for region in dict.fromkeys(sorted(regions)))
            print(f"  stage {number}: devices {' '.join(map(str, sorted(stage)))} ({counts})")


def _clusters(args: argparse.Namespace) -> None:
    from torchtitan.planner.ravnest import form_clusters, ravnest_cost, read_providers

    providers = read_providers(args.file)
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
