"""Save the initial weights as step 0 and train nothing: one beginning for runs that are to be compared.

python -m torchtitan seed_checkpoint train_configs/debug_model.toml
"""

import argparse
from collections.abc import Sequence

from torchtitan.hardware import read_place
from torchtitan.models.families import load_run_or_exit
from torchtitan.observe.log import start_logging

HELP = "save the initial weights as step 0 and train nothing"
_KEYS = ("--checkpoint.enable", "--checkpoint.create_seed_checkpoint")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "file", metavar="FILE.toml", nargs="?", help="the configuration (default: --job.config_file after --)"
    )
    parser.epilog = "After --: options of train.py."


def run(args: argparse.Namespace, options: Sequence[str]) -> None:
    place = read_place()
    file = ["--job.config_file", args.file] if args.file else []
    argv = [*file, *options, *_KEYS]
    config, blueprint = load_run_or_exit(argv, place.world_size, place.rank, prog="seed_checkpoint")
    start_logging(place.rank)

    from torchtitan.training.seed_checkpoint import save_seed_checkpoint

    save_seed_checkpoint(config, blueprint, place)
