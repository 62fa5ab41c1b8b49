"""Estimates what each rank of a run would hold and move, without the machines.

python -m torchtitan dry_run train_configs/llama3_405b.toml --world_size 512
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace

from torchtitan.hardware import read_place
from torchtitan.models.families import load_run_or_exit
from torchtitan.observe.log import start_logging

HELP = "estimate what each rank would hold and move, without the machines"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "file", metavar="FILE.toml", nargs="?", help="the configuration (default: --job.config_file after --)"
    )
    parser.add_argument("--world_size", type=int, help="ranks of the run (default: WORLD_SIZE)")
    parser.epilog = "After --: options of train.py."


def run(args: argparse.Namespace, options: Sequence[str]) -> None:
    place = read_place()
    place = replace(place, world_size=args.world_size or place.world_size)
    file = ["--job.config_file", args.file] if args.file else []
    config, blueprint = load_run_or_exit([*file, *options], place.world_size, place.rank, prog="dry_run")
    start_logging(place.rank)

    from torchtitan.tools.dry_run.report import dry_run

    dry_run(config, blueprint, place)
