"""Starts this node's part of a run as launch/start.py does, unless something is missing here that the run would need.

run_llama_train.sh ends with this module: the mistake is said once, before any rank exists.
"""

import sys

from torchtitan.config.schema import Config
from torchtitan.launch.start import Start, main
from torchtitan.models.spec import Blueprint
from torchtitan.tools.check import what_is_missing


def is_complete(start: Start, _: int) -> bool:
    if start.config is None or start.node is None:
        return True
    missing = what_is_missing(start.config, writes=start.node.rank == 0 or start.node.num_nodes == 1)
    for one in missing:
        print(f"run_llama_train.sh: {one}", file=sys.stderr)
    return not missing


def fitted_cut(config: Config, blueprint: Blueprint, world_size: int) -> list[str]:
    """The cut of a pipeline whose ranks have only so much memory."""
    parallelism = config.parallelism
    if parallelism.pipeline_parallel_memory_gib is None or parallelism.pipeline_parallel_layer_counts is not None:
        return []
    from torchtitan.tools.dry_run.cut import fit

    counts = fit(config, blueprint, world_size)
    return ["--parallelism.pipeline_parallel_layer_counts", *map(str, counts)]


def run(options: list[str]) -> None:
    main(options, check=is_complete, complete=fitted_cut)


if __name__ == "__main__":
    run(sys.argv[1:])
