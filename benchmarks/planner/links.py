"""Runs layouts of two small shapes over an emulated link between two sites, and says how well a plan ranks them.

    sudo .venv/bin/python -m benchmarks.planner.links clusters/cpu_1x2.toml

Each site has one rank. The plan rests on the file's probe of cores, and on the delay and the rate that are emulated.
"""

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path
from statistics import median

import tomli
import tomli_w

from benchmarks.planner.verify import KEYS, SHAPES
from titan_planner.plan.like import Like
from titan_planner.plan.verify import Trial, choose, judge, shown
from torchtitan.models.families import load_run_or_exit
from torchtitan.observe.planned import read_steps
from torchtitan.root import ROOT


def apart(cluster: Path, options: argparse.Namespace) -> Path:
    """The cluster's devices, each as a node of its own."""
    tables = tomli.loads(cluster.read_text(encoding="utf-8"))
    tables["nodes"] = {"count": 2, "devices": 1}
    tables["links"]["between_gbit_per_device"] = options.gbit
    tables["rates"]["hop"] = options.delay_ms / 1e3
    tables["rests_on"] += f", and a link of {options.gbit} Gbit/s with {options.delay_ms} ms"
    file = options.out / "cluster.toml"
    file.write_text(tomli_w.dumps(tables), encoding="utf-8")
    return file


def train(trial: Trial, repeat: int, network: Path, options: argparse.Namespace) -> float:
    folder = trial.file.parent.parent / f"{trial.file.stem}-{repeat}"
    shutil.rmtree(folder, ignore_errors=True)
    command = [sys.executable, "-m", "torchtitan", "netem", str(network), "--", "./run_llama_train.sh"]
    command += ["--training.steps", str(options.steps)]
    command += ["--job.dump_folder", str(folder), "--debug.seed", "0"]
    with folder.with_suffix(".log").open("w") as log:
        env = {**os.environ, "CONFIG_FILE": str(trial.file)}
        subprocess.run(command, cwd=ROOT, env=env, stdout=log, stderr=log, check=True, timeout=600)
    return float(median(record["step_seconds"] for record in read_steps(folder)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cluster", type=Path)
    parser.add_argument("--delay_ms", type=float, default=2.0, help="in each direction (default: %(default)s)")
    parser.add_argument("--gbit", type=float, default=0.5, help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=7, help="of each run (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=2, help="of each layout (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("outputs/verify_links"), help="default: %(default)s")
    options = parser.parse_args()
    options.out = options.out.absolute()
    options.out.mkdir(parents=True, exist_ok=True)
    network, cluster = options.out / "network.toml", apart(options.cluster, options)
    sites = [{"region": name, "devices": 1, "inside": [0, 10]} for name in ("Ohio", "Bonn")]
    case = {"name": "two sites", "groups": sites, "pairs": {"Ohio-Bonn": [options.delay_ms, options.gbit]}}
    network.write_text(tomli_w.dumps({"case": [case]}), encoding="utf-8")
    for name in ("debug", "wide"):
        given = ["--training.global_batch_size", "8", "--training.seq_len", "128"]
        for key, value in zip((*KEYS, "n_kv_heads"), (*SHAPES[name], 4), strict=True):
            given += [f"--model.{key}", str(value)]
        args = argparse.Namespace(file="train_configs/debug_model.toml", cluster=cluster, runs=options.out / name)
        args.show, args.verify, args.others, args.seed = 3, 3, 5, 0
        config, blueprint = load_run_or_exit(["--job.config_file", args.file, *given], None, 0, prog="plan")
        plan = Like(args, config, blueprint, given)
        trials = choose(args, config, plan.job, plan.cluster, plan.answer)
        for repeat in range(options.repeats):
            for trial in trials:
                trial.seconds.append(train(trial, repeat, network, options))
        print(f"{name}:\n{shown(trials, judge(trials))}", flush=True)


if __name__ == "__main__":
    main()
