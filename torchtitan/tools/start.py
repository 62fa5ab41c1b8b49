"""Starts this node's part of a run as launch/start.py does, unless something is missing or a preflight finds a fault.

run_llama_train.sh becomes this program, which prints each mistake once, before any rank exists.
"""

import os
import signal
import sys
from dataclasses import replace

if __name__ == "__main__":  # Ctrl-C during the imports ends Python without a traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from torchtitan.launch.start import NodeStart, become, plan_start
from torchtitan.models.families import plan_model
from torchtitan.tools.check import what_is_missing


def is_ready(start: NodeStart, gpus: int) -> bool:
    """Print what is missing here, and with PREFLIGHT what is wrong between the nodes; whether the run can start."""
    if start.config is None or start.node is None:
        return True
    missing = what_is_missing(start.config, writes=start.node.rank == 0 or start.node.num_nodes == 1)
    for one in missing:
        print(f"run_llama_train.sh: {one}", file=sys.stderr)
    if missing or os.environ.get("PREFLIGHT", "0") == "0":
        return not missing
    from torchtitan.launch.preflight.verb import nodes_are_ready

    return nodes_are_ready(start, gpus)


def with_cut(start: NodeStart) -> NodeStart:
    """The start of a run whose pipeline is cut to its ranks' memory, if the configuration asks for that."""
    if start.config is None or start.node is None:
        return start
    parallelism = start.config.parallelism
    if parallelism.pipeline_parallel_memory_gib is None or parallelism.pipeline_parallel_layer_counts is not None:
        return start
    from torchtitan.tools.dry_run.cut import fit

    counts = fit(start.config, plan_model(start.config), start.node.world_size)
    cut = ["--parallelism.pipeline_parallel_layer_counts", *map(str, counts)]
    return replace(start, arguments=[*start.arguments, *cut])


def run(options: list[str]) -> None:
    become(lambda gpus: with_cut(plan_start(os.environ, options, gpus, sys.stderr.isatty())), is_ready)


if __name__ == "__main__":
    run(sys.argv[1:])
