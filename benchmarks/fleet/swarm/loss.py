"""What meeting rarely costs: loss of held-out text of a swarm's sites beside data parallelism with the same tokens.

    python -m benchmarks.fleet.swarm.loss --seeds 3                   8M parameters, 4 sites, from a warm start
    python -m benchmarks.fleet.swarm.loss --warm 0 --steps 600        from first weights

Each seed: one run warms the model up; from its weights go on a single run with the batches of all sites in each step,
and a swarm for each codec. A line a run in results.jsonl.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from titan_fleet.swarm.certificates import make
from torchtitan.root import ROOT

MODEL = ["--job.config_file", "train_configs/debug_model.toml", "--model.hidden_dim", "1024", "--model.n_layers", "7"]
TEXT = ["--training.seq_len", "128", "--training.local_batch_size", "2", "--validation.seq_len", "128"]
REST = ["--metrics.no_enable_tensorboard", "--metrics.sample_freq", "None", "--metrics.log_freq", "50"]
SCHEDULE = ["--lr_scheduler.warmup_steps", "20", "--lr_scheduler.decay_type", "cosine", "--optimizer.lr"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sites", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--warm", type=int, default=400, help="steps of data parallelism before")
    parser.add_argument("--steps", type=int, default=300, help="of each site")
    parser.add_argument("--every", type=int, default=50)
    parser.add_argument("--lr", type=float, default=1e-3, help="after the warm start, which has 3e-3")
    parser.add_argument("--site_lr", type=float, help="of the sites, whose batches are smaller (as --lr)")
    parser.add_argument("--codecs", nargs="+", default=["int8", "float32", "int4"])
    parser.add_argument("--methods", nargs="+", default=["diloco"])
    parser.add_argument("--momentum", type=float, default=0.9, help="of the outer step")
    parser.add_argument("--out", type=Path, default=Path("outputs/swarm_loss"))
    args = parser.parse_args()
    args.out = args.out.absolute()
    args.out.mkdir(parents=True, exist_ok=True)
    for seed in range(args.seeds):
        measure(args, seed)


def measure(args: argparse.Namespace, seed: int) -> None:
    folder, one_site = args.out / f"seed-{seed}", ["--training.global_batch_size", "2"]
    together = ["--training.global_batch_size", str(2 * args.sites)]
    begin: list[str] = []
    if args.warm:
        keep = ["--checkpoint.enable", "--checkpoint.interval", str(args.warm), "--checkpoint.last_save_model_only"]
        train(folder / "warm", args.warm, seed, 3e-3, [*together, *keep])
        begin = ["--checkpoint.enable", "--checkpoint.initial_load_path", f"{folder}/warm/checkpoint/step-{args.warm}"]
        begin += ["--checkpoint.interval", str(10 * args.steps)]
    begin = begin or ["--checkpoint.no-enable"]
    note(args, seed, "single", train(folder / "single", args.steps, seed + 100, args.lr, [*together, *begin]))
    for method in args.methods:
        for codec in args.codecs:
            name = f"{method}-{codec}"
            note(args, seed, name, swarm(args, folder / name, seed, method, codec, [*one_site, *begin]))


def note(args: argparse.Namespace, seed: int, name: str, loss: float) -> None:
    line = {"seed": seed, "run": name, "warm": args.warm, "steps": args.steps, "every": args.every, "loss": loss}
    with (args.out / "results.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
    print(f"seed {seed}  {name:18} {loss:.4f}", flush=True)


def train(folder: Path, steps: int, seed: int, lr: float, options: Sequence[str]) -> float:
    start(folder, steps, seed, lr, options).wait()
    return loss_of(folder)


def swarm(args: argparse.Namespace, folder: Path, seed: int, method: str, codec: str, options: Sequence[str]) -> float:
    names = [f"site-{number}" for number in range(args.sites)]
    make(folder / "keys", ["127.0.0.1"], names)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    count, lr = str(args.sites), args.site_lr or args.lr
    section = ["--swarm.every", str(args.every), "--swarm.quorum", count, "--swarm.sites", count, "--swarm.delay", "5"]
    section += ["--swarm.method", method, "--swarm.codec", codec, "--swarm.outer_momentum", str(args.momentum)]
    words = ["-m", "torchtitan", "swarm", "serve", MODEL[1], "--keys", f"{folder}/keys/syncer", "--out"]
    words += [f"{folder}/syncer", "--host", "127.0.0.1", "--port", str(port), "--", *MODEL[2:], *TEXT, *section]
    serve = launch([*words, *SCHEDULE, str(lr), "--debug.seed", str(seed + 100)], folder / "syncer.log")
    try:
        sites = []
        for name in names:
            own = ["--swarm.syncer", f"https://127.0.0.1:{port}", "--swarm.site", name]
            own += ["--swarm.keys", f"{folder}/keys/{name}"]
            sites.append(start(folder / name, args.steps, seed + 100, lr, [*options, *section, *own]))
        for site in sites:
            site.wait()
    finally:
        serve.terminate()
        serve.wait()
    return sum(loss_of(folder / name) for name in names) / len(names)


def start(folder: Path, steps: int, seed: int, lr: float, options: Sequence[str]) -> "subprocess.Popen[bytes]":
    words = ["train.py", *MODEL, *TEXT, *REST, *SCHEDULE, str(lr), "--debug.seed", str(seed)]
    words += ["--training.steps", str(steps), "--validation.freq", str(steps), "--validation.steps"]
    words.append(str(256 // int(options[options.index("--training.global_batch_size") + 1])))  # of the same tokens
    folder.parent.mkdir(parents=True, exist_ok=True)
    return launch([*words, "--job.dump_folder", str(folder), *options], folder.with_suffix(".log"))


def launch(words: Sequence[str], log: Path) -> "subprocess.Popen[bytes]":
    with log.open("wb") as file:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        return subprocess.Popen([sys.executable, *words], cwd=ROOT, env=environment, stdout=file, stderr=file)


def loss_of(folder: Path) -> float:
    if not (file := folder / "validation.jsonl").exists():
        sys.exit(f"{folder} has no loss of held-out text; {folder.with_suffix('.log')} says why")
    lines: list[dict[str, Any]] = [json.loads(line) for line in file.read_text().splitlines()]
    return float(lines[-1]["validation_loss"])


if __name__ == "__main__":
    begun = time.monotonic()
    main()
    print(f"{time.monotonic() - begun:.0f} s")
