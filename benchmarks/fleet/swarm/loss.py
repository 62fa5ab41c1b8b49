"""What rare meetings cost: `swarm try` with several seeds, from first weights or from a run that was trained before.

    python -m benchmarks.fleet.swarm.loss                          # three seeds of train_configs/swarm_debug.toml
    python -m benchmarks.fleet.swarm.loss --warm 500 --rates 0.016 0.016 0.004
    python -m benchmarks.fleet.swarm.loss --every 30 -- --swarm.outer_momentum 0.3

Prints the mean over the seeds of the swarm's loss beside one run with the same tokens and beside one site alone. Each
seed's folder has its result.json and its picture.
"""

import argparse
import statistics
import subprocess
import sys
import time
from pathlib import Path

from titan_fleet.swarm.attempt import BATCH, BEST_RATES, CONFIG, Trial, compare
from torchtitan.root import ROOT


def main() -> None:
    words = sys.argv[1:]
    own, options = (words[: words.index("--")], words[words.index("--") + 1 :]) if "--" in words else (words, [])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sites", type=int, default=3)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--warm", type=int, default=0, help="steps of one run with all tokens before")
    parser.add_argument("--steps", type=int, default=500, help="of each site")
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--codec", default="int8")
    parser.add_argument("--rates", nargs=3, type=float, default=BEST_RATES.values(), help="swarm, one run, site alone")
    parser.add_argument("--out", type=Path, default=Path("outputs/swarm_loss"))
    args = parser.parse_args(own)
    beside_one_run, beside_alone = [], []
    for seed in range(args.seeds):
        more = [*options, "--debug.seed", str(seed)]
        if args.warm:
            more += ["--checkpoint.enable", "--checkpoint.interval", "1000000"]  # keeps nothing but the end
            more += ["--checkpoint.initial_load_path", warmed(args, seed, options)]
        rates = dict(zip(BEST_RATES, args.rates, strict=True))
        folder = args.out.absolute() / f"seed-{seed}"
        result = compare(Trial(folder, args.sites, args.steps, args.every, args.codec, rates, more))
        beside_one_run.append(result["loss_swarm"] / result["loss_single"] - 1)
        beside_alone.append(result["loss_swarm"] / result["loss_alone"] - 1)
    for what, shares in (("one run", beside_one_run), ("one site alone", beside_alone)):
        each = ", ".join(f"{share:+.2%}" for share in shares)
        print(f"the swarm beside {what}: {statistics.mean(shares):+.2%} (each seed: {each})")


def warmed(args: argparse.Namespace, seed: int, options: list[str]) -> str:
    """The checkpoint of one run with the batches of all sites."""
    folder = args.out.absolute() / f"warm-{seed}"
    words = ["--job.config_file", CONFIG, "--job.dump_folder", str(folder), "--debug.seed", str(seed + 100), *options]
    words += ["--training.steps", str(args.warm), "--training.global_batch_size", str(args.sites * BATCH)]
    words += ["--optimizer.lr", str(BEST_RATES["single"]), "--checkpoint.enable", "--checkpoint.last_save_model_only"]
    subprocess.run([sys.executable, "train.py", *words, "--checkpoint.interval", str(args.warm)], cwd=ROOT, check=True)
    return f"{folder}/checkpoint/step-{args.warm}"


if __name__ == "__main__":
    begun = time.monotonic()
    main()
    print(f"{time.monotonic() - begun:.0f} s")
