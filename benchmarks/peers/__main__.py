"""Other trainers beside this one: the same shape, batch, precision and optimizer, in turn, on this machine.

    python -m benchmarks.peers --preset cpu-60m --repeats 3

Each peer has its own documented fast settings, and an environment of its own under outputs/peers, which the first
run makes. Printed are medians over the repeats, and for each peer the median of this recipe's figure over the peer's.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.run import PRESETS, ROOT, measure
from torchtitan.config.load import load_config
from torchtitan.models.llama.args import FLAVORS

# name -> the program that trains, its packages besides torch, and its options
PEERS: dict[str, tuple[str, list[str], dict[str, Any]]] = {
    "Trainer": ("trainer.py", ["transformers==5.23.0", "accelerate==1.15.0"], {"compile": False}),
    "Trainer, torch_compile": ("trainer.py", ["transformers==5.23.0", "accelerate==1.15.0"], {"compile": True}),
    "LitGPT, compiled": ("lit.py", ["litgpt==0.5.13"], {"compile": True}),
}
WARMUP = 5


def set_up(program: str, packages: list[str]) -> Path:
    """The Python of a peer's environment, made if need be."""
    folder = ROOT / "outputs/peers" / Path(program).stem
    python = folder / "bin/python"
    if not (folder / "ready").exists():
        torch = next(
            line for line in (ROOT / "requirements.txt").read_text().splitlines() if line.startswith("torch==")
        )
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", torch, "numpy", *packages], check=True)
        (folder / "ready").touch()
    return python


def run_peer(name: str, preset: str) -> dict[str, Any]:
    """A peer's median step after the first ones, as benchmarks.run has it."""
    program, packages, options = PEERS[name]
    config = load_config(["--job.config_file", str(PRESETS[preset])], 1)
    shape = asdict(FLAVORS[config.model.name][config.model.flavor])
    asked = options | {
        "model": shape | {"vocab_size": config.model.vocab_size or shape["vocab_size"]},
        "batch": config.training.local_batch_size,
        "seq_len": config.training.seq_len,
        "steps": config.training.steps,
        "lr": config.optimizer.lr,
    }
    python = set_up(program, packages)
    done = subprocess.run(
        [python, ROOT / "benchmarks/peers" / program, json.dumps(asked)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{name} failed:\n{done.stderr[-3000:]}")
    answer = json.loads(done.stdout.splitlines()[-1])
    tokens = config.training.local_batch_size * config.training.seq_len
    seconds = statistics.median(answer["step_seconds"][WARMUP:])
    return {"tokens_per_second": tokens / seconds, "memory_gib": answer["memory_gib"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=PRESETS, default="cpu-60m")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    for program, packages, _ in PEERS.values():
        set_up(program, packages)
    seen: dict[str, list[dict[str, Any]]] = {name: [] for name in ["this recipe", *PEERS]}
    for _ in range(args.repeats):
        seen["this recipe"].append(measure(args.preset, [], WARMUP))
        for name in PEERS:
            seen[name].append(run_peer(name, args.preset))
    ours = seen["this recipe"]
    print(f"{args.preset}, {args.repeats} runs of each in turn, {os.cpu_count()} cores\n")
    print("| | tokens/s | ours to it | peak memory | ours to it |\n| --- | --- | --- | --- | --- |")
    for name, runs in seen.items():
        speed, memory = (statistics.median(run[key] for run in runs) for key in ("tokens_per_second", "memory_gib"))
        faster = statistics.median(
            a["tokens_per_second"] / b["tokens_per_second"] for a, b in zip(ours, runs, strict=True)
        )
        smaller = statistics.median(a["memory_gib"] / b["memory_gib"] for a, b in zip(ours, runs, strict=True))
        print(f"| {name} | {speed:,.0f} | {faster:.2f} | {memory:.2f} GiB | {smaller:.2f} |")


if __name__ == "__main__":
    main()
