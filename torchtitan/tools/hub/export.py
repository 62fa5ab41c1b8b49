"""A trained model of your own, as files that need none of this recipe.

python -m torchtitan export outputs/digits digits-model          model.safetensors, and model.pt2 for torch.export.load
"""

import argparse
from collections.abc import Sequence

HELP = "take a trained model of your own away, as safetensors and a program"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", metavar="FROM", help="a run folder (its newest checkpoint), or a folder step-N")
    parser.add_argument("target", metavar="TO", help="the folder to write, new or empty")


def run(args: argparse.Namespace, _: Sequence[str]) -> None:
    from torchtitan.tools.hub.own_model import export

    export(args.checkpoint, args.target)
