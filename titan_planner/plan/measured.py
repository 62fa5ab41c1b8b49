"""Shows what a plan predicted beside what its run measured."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from torchtitan.observe.planned import report
from torchtitan.tools.runs import read_config

HELP = "show what a plan predicted beside what its run measured"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, help="Read this run folder")
    parser.add_argument(
        "--plan", type=Path, required=True, metavar="PLAN.json", help="Read the prediction that --out wrote"
    )


def run(args: argparse.Namespace, _: Sequence[str]) -> None:
    print(report(args.run, args.plan, read_config(args.run)))
