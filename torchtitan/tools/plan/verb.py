"""Finds the fastest layouts of a run on machines that a file describes, before the run is paid for.

python -m torchtitan plan CONFIG.toml --cluster FILE.toml
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from torchtitan.refusal import Refusal

HELP = "find the fastest layouts of a run on given machines"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="CONFIG.toml", help="Plan this run; the search replaces its layout")
    parser.add_argument(
        "--cluster", type=Path, required=True, metavar="FILE.toml", help="Plan for these machines (see clusters/)"
    )
    parser.add_argument("--show", type=int, default=8, metavar="N", help="List N layouts (default: %(default)s)")
    parser.add_argument("--explain", action="store_true", help="Break down the best step, its memory and its traffic")
    parser.add_argument("--what_if", action="store_true", help="Search again with other machines")
    parser.add_argument("--schedules", action="store_true", help="Simulate the best pipeline under torch's schedules")
    parser.add_argument(
        "--drawing", type=Path, metavar="FILE", help="Draw the best pipeline (SVG, PNG), or a map (SVG)"
    )
    parser.add_argument("--out", type=Path, metavar="PLAN.toml", help="Write the best layout as a configuration")
    parser.add_argument("--verify", type=int, metavar="K", help="Train the best K and --others on this machine")
    parser.add_argument(
        "--others", type=int, default=5, help="Let --verify train as many others (default: %(default)s)"
    )
    parser.add_argument("--repeats", type=int, default=1, help="Let --verify run each as often (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=8, help="Train as many steps a run, from 5 (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=20, help="Stop --verify after so many minutes (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="Change it to draw or search anew (default: %(default)s)")
    parser.add_argument(
        "--runs", type=Path, default=Path("outputs/verify"), metavar="FOLDER", help="Put --verify's runs here"
    )
    parser.epilog = "Give options of train.py after --; the search keeps keys of the layout that you give there."


def run(args: argparse.Namespace, options: Sequence[str]) -> None:
    from torchtitan.tools.plan.places.network import is_unlike

    if is_unlike(args.cluster):
        from torchtitan.tools.plan.places import listing

        if unknown := [name for name in ("verify", "schedules") if getattr(args, name) not in (None, False)]:
            raise Refusal(f"--{unknown[0]} is for like nodes, but {args.cluster} has unlike ones; leave it out")
        listing.run(args, options)
        return
    from torchtitan.tools.plan import layout

    answered = layout.run(args, options)
    if args.verify is not None:
        from torchtitan.tools.plan.verify import verify

        verify(args, options, *answered)
