"""A trained model of your own, as files that need none of this recipe.

python -m torchtitan export outputs/digits digits-model          model.safetensors, and model.pt2 for torch.export.load
python -m torchtitan export outputs/digits digits-model --stages 2    and what each of two pipeline stages would hold
"""

import argparse
from collections.abc import Sequence

HELP = "take a trained model of your own away, as safetensors and a program"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", metavar="FROM", help="a run folder (its newest checkpoint), or a folder step-N")
    parser.add_argument("target", metavar="TO", help="the folder to write, new or empty")
    parser.add_argument("--stages", type=int, default=0, help="also write what so many pipeline stages would compute")


def run(args: argparse.Namespace, _: Sequence[str]) -> None:
    from torchtitan.tools.hub.own_model import export

    export(args.checkpoint, args.target, args.stages)
