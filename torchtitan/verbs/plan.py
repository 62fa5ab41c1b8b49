"""`python -m torchtitan plan`: propose layouts, predict published runs (`rows`), put stages on a network (`place`)."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from torchtitan.refusal import Refusal


def add_arguments(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="what", required=True)
    layout = verbs.add_parser("layout", help="List the fastest layouts of a run; you may leave this word out")
    layout.add_argument("file", metavar="CONFIG.toml", help="Plan this run; the search replaces its layout")
    layout.add_argument(
        "--cluster", type=Path, required=True, metavar="FILE.toml", help="Plan for these machines (see clusters/)"
    )
    layout.add_argument("--show", type=int, default=8, metavar="N", help="List N layouts (default: %(default)s)")
    layout.add_argument("--explain", action="store_true", help="Break down the best step, its memory and its traffic")
    layout.add_argument("--what_if", action="store_true", help="Search again with other machines")
    layout.add_argument("--schedules", action="store_true", help="Simulate the best pipeline under torch's schedules")
    layout.add_argument(
        "--drawing", type=Path, metavar="FILE", help="Draw the best pipeline (SVG, PNG), or a map (SVG)"
    )
    layout.add_argument("--out", type=Path, metavar="PLAN.toml", help="Write the best layout as a configuration")
    layout.add_argument("--verify", type=int, metavar="K", help="Train the best K and --others on this machine")
    layout.add_argument(
        "--others", type=int, default=5, help="Let --verify train as many others (default: %(default)s)"
    )
    layout.add_argument("--repeats", type=int, default=1, help="Let --verify run each as often (default: %(default)s)")
    layout.add_argument("--steps", type=int, default=8, help="Train as many steps a run, from 5 (default: %(default)s)")
    layout.add_argument("--minutes", type=float, default=20, help="Stop --verify after so many minutes (%(default)s)")
    layout.add_argument("--seed", type=int, default=0, help="Change it to draw or search anew (default: %(default)s)")
    layout.add_argument(
        "--runs", type=Path, default=Path("outputs/verify"), metavar="FOLDER", help="Put --verify's runs here"
    )
    layout.epilog = "Give options of train.py after --; the search keeps keys of the layout that you give there."

    measured = verbs.add_parser("measured", help="Show what a plan predicted beside what its run measured")
    measured.add_argument("run", type=Path, help="Read this run folder")
    measured.add_argument(
        "--plan", type=Path, required=True, metavar="PLAN.json", help="Read the prediction that --out wrote"
    )

    rows = verbs.add_parser("rows", help="Predict the runs of a file, and compare them with measurements")
    rows.add_argument("file", type=Path, metavar="FILE.toml")
    rows.add_argument("--fit", default="", metavar="ID,ID", help="Fit rates on these rows (default: none)")
    rows.add_argument("--rates", type=int, default=2, metavar="N", help="Fit at most N rates (default: %(default)s)")
    rows.add_argument("--leave_out", default="", metavar="ID,ID", help="Do not read these rows")
    rows.add_argument("--explain", action="store_true", help="Break down each step")

    place = verbs.add_parser("place", help="Decide which device serves which pipeline stage on unlike links")
    place.add_argument("file", type=Path, metavar="FILE", help="Read networks (TOML) or Ravnest's node_configs.json")
    place.add_argument("--model_gb", type=float, help="Form Ravnest's clusters for a model of this many GB")
    place.add_argument(
        "--objective",
        choices=("all", "dtfm", "ours", "ravnest"),
        default="all",
        help="Minimize DT-FM's cost, our own, or form Ravnest's clusters (default: the first two)",
    )
    place.add_argument("--drawing", type=Path, metavar="FILE.svg", help="Draw the first network's map of stages")
    place.add_argument("--seed", type=int, default=0, help="Change it to search anew (default: %(default)s)")
    place.add_argument(
        "--restarts", type=int, default=1, help="By DT-FM's cost, start at random as often (default: %(default)s)"
    )
    place.add_argument(
        "--steps",
        type=int,
        default=4000,
        help="Let a search take so many steps, or by our objective 25 times as many (%(default)s)",
    )


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

        if unknown := [name for name in ("verify", "schedules") if getattr(args, name) not in (None, False)]:
            raise Refusal(f"--{unknown[0]} is for like nodes, but {args.cluster} has unlike ones; leave it out")
        plan_unlike.run(args, options)
        return
    from torchtitan.verbs import plan_layout

    answered = plan_layout.run(args, options)
    if args.verify is not None:
        from torchtitan.verbs.plan_verify import verify

        verify(args, options, *answered)
