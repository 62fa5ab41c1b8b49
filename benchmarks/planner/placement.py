"""Trains over the eight regions of DT-FM's fifth network, scaled down: planned against random order of the nodes.

    sudo .venv/bin/python -m benchmarks.planner.placement

Its eight regions, with two devices each, are emulated by `python -m torchtitan netem`. A small Llama trains on
PP 8 x DP 2. It moves fewer bytes than DT-FM's job, and rates are lower by the same factor; delays are as in the file.
So each transfer takes as long as DT-FM's. The planner knows the bytes and the network, and no time of a device.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import tomli_w

from titan_planner.places.pipelines import Pipelines
from titan_planner.places.placement import FixedPipeline, Network, read_networks
from titan_planner.places.verb import load_of
from torchtitan.root import ROOT

NETWORKS = ROOT / "tests/assets/planning/dtfm_networks.toml"
STAGES, PER_STAGE, LAYERS, DIM, HIDDEN, VOCABULARY = 8, 2, 8, 64, 192, 2048
SEQUENCES, LENGTH = 8, 256  # of one pipeline in a step
OPTIONS = f"""--model.dim {DIM} --model.n_layers {LAYERS} --model.n_heads 4 --model.n_kv_heads 4
    --model.hidden_dim {HIDDEN} --parallelism.pipeline_parallel_degree {STAGES}
    --parallelism.data_parallel_replicate_degree {PER_STAGE} --parallelism.data_parallel_shard_degree 1
    --training.seq_len {LENGTH} --training.local_batch_size {SEQUENCES} --lr_scheduler.warmup_steps 1
    --training.global_batch_size {SEQUENCES * PER_STAGE} --metrics.log_freq 1 --metrics.no_enable_tensorboard
    --metrics.sample_freq None --validation.no_enable --checkpoint.no_enable""".split()


def scaled_down(network: Network) -> Network:
    """Two devices of each region."""
    regions = dict.fromkeys(network.regions)
    kept = [i for region in regions for i in np.flatnonzero(np.array(network.regions) == region)[:PER_STAGE]]
    few = np.ix_(kept, kept)
    return Network(network.delay[few], network.bandwidth[few], tuple(network.regions[i] for i in kept))


def job() -> FixedPipeline:
    """GB in float32 of the largest stage's gradients, and of what one pipeline sends between two stages."""
    layer = 4 * DIM * DIM + 3 * DIM * HIDDEN
    gradients = 4 * (LAYERS // STAGES * layer + VOCABULARY * DIM)
    sent = 4 * SEQUENCES * LENGTH * DIM
    return FixedPipeline(STAGES, PER_STAGE, gradients / 1e9, sent / 1e9, layers=LAYERS, microbatches=SEQUENCES)


def train(order: list[int], network: Path, options: argparse.Namespace, name: str) -> float:
    """Seconds of a step: the mean of all but the first."""
    folder = options.out / name
    netem = [sys.executable, "-m", "torchtitan", "netem", str(network), "--order", ",".join(map(str, order))]
    netem += ["--rate_factor", str(options.rate_factor), "--measure", "8", "--", "./run_llama_train.sh", *OPTIONS]
    netem += ["--training.steps", str(options.steps), "--job.dump_folder", str(folder)]
    netem += ["--comm.init_timeout_seconds", "600", "--comm.train_timeout_seconds", "600"]
    with (options.out / f"{name}.log").open("w") as log:
        subprocess.run(netem, cwd=ROOT, stdout=log, stderr=log, check=True)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return float(np.mean([json.loads(line)["step_seconds"] for line in lines][1:]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--orders", type=int, default=2, help="random ones (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=3, help="steps of each run (default: %(default)s)")
    parser.add_argument("--rate_factor", type=float, help="default: so that a transfer takes as long as DT-FM's")
    parser.add_argument("--out", type=Path, default=Path("outputs/placement"), help="default: %(default)s")
    options = parser.parse_args()
    options.out = options.out.absolute()
    options.out.mkdir(parents=True, exist_ok=True)
    theirs, cases = read_networks(NETWORKS)
    options.rate_factor = options.rate_factor or job().gradients / theirs.gradients
    network = scaled_down(cases[4][1])
    about = {"name": "case 5, scaled down", "regions": list(network.regions)}
    about |= {"delay_ms": (network.delay * 1e3).tolist(), "gbit": network.bandwidth.tolist()}
    sizes = {"stages": STAGES, "devices_per_stage": PER_STAGE, "c_dp": job().gradients, "c_pp": job().activations}
    file = options.out / "network.toml"
    file.write_text(tomli_w.dumps({"job": sizes, "case": [about]}))
    slower = Network(network.delay, network.bandwidth * options.rate_factor, network.regions)
    pipelines, chance = Pipelines(slower, load_of(job(), slower)), np.random.default_rng(0)
    orders = {"planned": np.array(pipelines.search().nodes).ravel()}
    orders |= {f"random {i}": chance.permutation(len(slower.regions)) for i in range(options.orders)}
    measured = {}
    print("| order of the nodes | predicted, without computation | measured |\n| --- | --- | --- |", flush=True)
    for name, order in orders.items():
        measured[name] = train(order.tolist(), file, options, name.replace(" ", "-"))
        where = " ".join(network.regions[device] for device in order)
        predicted = pipelines.plan(order, pipelines.split(order)).seconds
        print(f"| {name}: {where} | {predicted:.2f} s | {measured[name]:.2f} s a step |", flush=True)
    mean = np.mean([seconds for name, seconds in measured.items() if name != "planned"])
    print(f"\nrandom {mean:.2f} s, planned {measured['planned']:.2f} s: {mean / measured['planned']:.2f} times as fast")


if __name__ == "__main__":
    main()
