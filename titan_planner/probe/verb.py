"""Starts this node's ranks of a probe, which measures devices and links and writes a cluster file.

PROBE=1 ./run_llama_train.sh    on each node, with the variables of a training run
python -m torchtitan probe      the same
"""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from torchtitan.launch.start import NodeStart, become, plan_program
from torchtitan.refusal import Refusal

HELP = "measure devices and links, and write a cluster file"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_what_it_writes(parser)
    parser.epilog = "NGPU says how many processes to start, as for ./run_llama_train.sh: one a GPU, or one on a CPU."


def add_what_it_writes(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("clusters/here.toml"),
        help="Write the cluster file here (default: %(default)s)",
    )
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float32"),
        help="Give the mixed_precision_param of the runs to plan (default: the one that multiplies faster here)",
    )


def run(args: argparse.Namespace, options: Sequence[str]) -> int:
    become(lambda gpus: plan(args, gpus))
    return 0  # PRINT_ONLY


def check_out(out: Path) -> None:
    if out.is_dir() or out.suffix != ".toml":
        raise Refusal(f"--out {out} is no name of a TOML file; use a name such as clusters/here.toml")


def plan(args: argparse.Namespace, gpus: int) -> NodeStart:
    check_out(args.out)
    program = ["-m", "titan_planner.probe.rank", str(args.out), *[args.dtype] * (args.dtype is not None)]
    start = plan_program(os.environ, f"measuring for {args.out}", program, gpus)
    above = next(folder for folder in args.out.absolute().parents if folder.exists())
    if start.node is not None and not start.node.rank and not os.access(above, os.W_OK):
        raise Refusal(f"--out {args.out}: {above} cannot be written; use a folder of your own")
    return start
