"""How many layouts a second the planner weighs on one core, in closed form and by simulation.

python -m benchmarks.planner.speed
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"

import time
from collections.abc import Callable

import numpy as np

from benchmarks.recipe.run import ROOT
from titan_planner.plan.cluster import read_cluster
from titan_planner.plan.like import job_of
from titan_planner.plan.pipeline.actions import list_actions
from titan_planner.plan.pipeline.timeline import simulate
from titan_planner.plan.search import evaluate, layouts, search
from torchtitan.models.families import load_run

ANSWERS = (("llama3_70b", "h100_128x8"), ("llama3_405b", "h100_2048x8"))
PIPELINES = (("1F1B", 4, 1, 16), ("Interleaved1F1B", 8, 4, 32))  # ranks, stages of each, microbatches
AT_ONCE = (1, 64, 512)


def rate(count: int, weigh: Callable[[], object], repeats: int = 5) -> str:
    """The median of a few runs, after one to warm up."""
    weigh()
    taken = []
    for _ in range(repeats):
        began = time.process_time()
        weigh()
        taken.append(time.process_time() - began)
    return f"{count / np.median(taken):11,.0f}/s"


def closed_form(preset: str, nodes: str) -> str:
    cluster = read_cluster(ROOT / f"clusters/{nodes}.toml")
    options = ["--job.config_file", str(ROOT / f"train_configs/{preset}.toml"), "--training.global_batch_size", "1024"]
    config, blueprint = load_run(options, None)
    job = job_of(config, blueprint, cluster.num_devices, [])
    spaces, counts = list(layouts(job, cluster)), dict[int, tuple[int, ...]]()

    def weigh() -> None:
        for mode, columns in spaces:
            evaluate(job, cluster, columns, mode, counts)

    number = search(job, cluster).num_layouts
    found = rate(number, lambda: search(job, cluster))
    return f"closed form {rate(number, weigh)}; with finding and ordering {number:,} layouts {found}"


def simulated(schedule: str, ranks: int, stages: int, microbatches: int, count: int) -> str:
    orders = list_actions(schedule, ranks, stages, microbatches)
    seconds = {(stage, kind): np.random.rand(count) for stage in range(ranks * stages) for kind in "FB"}
    return rate(count, lambda: simulate(orders, seconds, 0.1))


def main() -> None:
    for preset, nodes in ANSWERS:
        print(f"{preset} on {nodes}: {closed_form(preset, nodes)}")
    for schedule, ranks, stages, microbatches in PIPELINES:
        for count in AT_ONCE:
            found = simulated(schedule, ranks, stages, microbatches, count)
            print(f"{schedule}, {ranks} ranks of {stages}, {microbatches} microbatches, {count:3} at once: {found}")


if __name__ == "__main__":
    main()
