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
    layout.add_argument("--seed", type=int, default=0, help="of draws and searches (default: %(default)s)")
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
    place.add_argument(
        "--objective",
        choices=("all", "dtfm", "ours", "ravnest"),
        default="all",
        help="what is lowered: DT-FM's cost, our own, or Ravnest's clusters (default: the first two)",
    )
    place.add_argument("--drawing", type=Path, metavar="FILE.svg", help="draw the first network's map of stages")
    place.add_argument("--seed", type=int, default=0, help="of the search (default: %(default)s)")
    place.add_argument("--restarts", type=int, default=6, help="from random placements (default: %(default)s)")
    place.add_argument("--steps", type=int, default=4000, help="of each search at length (default: %(default)s)")


def run(args: argparse.Namespace, options: Sequence[str]) -> None:
    if args.what == "layout":
        _layout(args, options)
    elif args.what == "measured":
        from torchtitan.observe.planned import report
        from torchtitan.verbs.runs import read_config

        print(report(args.run, args.plan, read_config(args.run)))
    elif args.what == "rows":
        from torchtitan.verbs import plan_rows

        plan_rows.run(args)
    else:
        from torchtitan.verbs import plan_place

        plan_place.run(args)


def _layout(args: argparse.Namespace, options: Sequence[str]) -> None:
    from torchtitan.planner.network import is_unlike

    if is_unlike(args.cluster):
        from torchtitan.verbs import plan_unlike

        if unknown := [name for name in ("verify", "explain", "schedules") if getattr(args, name) not in (None, False)]:
            raise Refusal(f"--{unknown[0]} is for like nodes, but {args.cluster} has unlike ones; leave it out")
        plan_unlike.run(args, options)
        return
    from torchtitan.verbs import plan_layout

    answered = plan_layout.run(args, options)
    if args.verify is not None:
        from torchtitan.verbs.plan_verify import verify

        verify(args, options, *answered)
