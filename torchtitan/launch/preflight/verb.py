"""Runs a preflight on this node: before training, or alone.

PREFLIGHT=1 ./run_llama_train.sh            on each node: trains if every check passes
python -m torchtitan preflight              on each node, with the same variables: only checks
"""

import argparse
import os
from collections.abc import Sequence

from torchtitan.launch.preflight import member
from torchtitan.launch.start import NodeStart, count_gpus, plan_start

HELP = "check that all nodes of a run can reach each other and are alike"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "Run this on each node, with the variables of ./run_llama_train.sh. After --: options of train.py."


def run(args: argparse.Namespace, options: Sequence[str]) -> int:
    """0 if the nodes are ready for a run with these options of train.py; prints what is wrong if they are not."""
    gpus = count_gpus(os.environ.get("CUDA_VISIBLE_DEVICES"))
    return 0 if nodes_are_ready(plan_start(os.environ, list(options), gpus), gpus) else 1


def nodes_are_ready(start: NodeStart, gpus: int) -> bool:
    if start.node is None or start.config is None:  # a dry run needs no nodes
        return True
    return member.run(start.node, start.config, {**os.environ, **start.settings}, gpus)
