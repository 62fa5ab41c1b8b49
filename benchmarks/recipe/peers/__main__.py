"""Compares this recipe with other trainers on this machine: the same shape, batch, precision and optimizer, in turn.

    python -m benchmarks.recipe.peers --preset cpu-60m --repeats 3
    python -m benchmarks.recipe.peers --preset cpu-60m --only trainer --lora 16

Each peer runs with its own documented fast settings, in an environment under outputs/peers that the first run creates.
With WHEELS set, as benchmarks/recipe/on_gpu.sh sets it, the peers run in this environment. The table shows medians over
the repeats, and the median ratio of this recipe's figure to the peer's. Below are those that could not run, and why. If
a peer keeps weights, gradients and moments in bfloat16 where the preset does not, this recipe trains once more with the
same.
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

from benchmarks.recipe.run import PRESETS, ROOT, measure, publish
from torchtitan.config.load import load_config
from torchtitan.config.schema import Config
from torchtitan.launch.node import KEEP_FREED_MEMORY
from torchtitan.models.families import find_model

# name -> the program that trains, its packages besides torch, and its options ("experts": how it computes a mixture)
_TRAINER = ["transformers==5.23.0", "accelerate==1.15.0", "peft==0.21.2"]
PEERS: dict[str, tuple[str, list[str], dict[str, Any]]] = {
    "Trainer": ("trainer.py", _TRAINER, {"compile": False, "experts": "eager"}),
    "Trainer, torch_compile": ("trainer.py", _TRAINER, {"compile": True, "experts": "eager"}),
    "Trainer, grouped_mm": ("trainer.py", _TRAINER, {"compile": False, "experts": "grouped_mm"}),
    "Trainer, grouped_mm, torch_compile": ("trainer.py", _TRAINER, {"compile": True, "experts": "grouped_mm"}),
    "LitGPT, compiled": ("lit.py", ["litgpt==0.5.13"], {"compile": True}),
    "torchtitan 0.2.2, compiled": ("titan.py", ["torchtitan==0.2.2", "torchao==0.18.0"], {}),
}
WARMUP = 5
IN_BFLOAT16 = ["--training.dtype", "bfloat16", "--optimizer.moments_dtype", "bfloat16"]


def why_not(name: str, config: Config, has_gpu: bool) -> str:
    """Return why a peer cannot train this preset here, or "" if it can."""
    is_titan = PEERS[name][0] == "titan.py"
    has_experts = hasattr(find_model(config.model).shape, "num_experts")
    if has_experts and PEERS[name][0] != "trainer.py":
        return "is not given experts here"
    if not has_experts and PEERS[name][2].get("experts") == "grouped_mm":
        return "differs only with experts"
    if is_titan and not has_gpu:
        return "trains on GPUs only"
    return "does not train in float8" if config.model.converters and not is_titan else ""


def set_up(program: str, packages: list[str]) -> Path:
    """Return the Python of a peer's environment. Create the environment if it does not exist."""
    if os.environ.get("WHEELS"):
        return Path(sys.executable)
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


def run_peer(name: str, config: Config, lora: int | None, keeps_memory: bool) -> dict[str, Any]:
    """Run a peer. Return the figures of its median step after warm-up, as run.py does, or why it failed."""
    program, packages, options = PEERS[name]
    blueprint = find_model(config.model)
    float8 = config.quantize.linear.float8.model_dump(exclude={"emulate"})
    asked = options | {
        "model": {key: value for key, value in asdict(blueprint.shape).items() if key != "rope_scaling"},
        "parameters": blueprint.num_parameters,
        "float8": float8 if config.model.converters else None,
        "batch": config.training.local_batch_size,
        "seq_len": config.training.seq_len,
        "steps": config.training.steps,
        "lr": config.optimizer.lr,
        "log_freq": config.metrics.log_freq,
        "lora": lora,
    }
    python = set_up(program, packages)
    done = subprocess.run(
        [python, ROOT / "benchmarks/recipe/peers" / program, json.dumps(asked)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | (KEEP_FREED_MEMORY if keeps_memory else {}),
    )
    if done.returncode:
        print(f"{name}:\n{done.stderr[-3000:]}", file=sys.stderr)
        said = [line for line in done.stderr.splitlines() if "Error" in line]
        return {"failed": said[-1] if said else f"exit code {done.returncode}"}
    answer = json.loads(done.stdout.splitlines()[-1])
    tokens = config.training.local_batch_size * config.training.seq_len
    seconds = statistics.median(answer["step_seconds"][WARMUP:])
    return answer | {"tokens_per_second": tokens / seconds}


def main() -> None:
    import torch

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=PRESETS, default="cpu-60m", help="what all train (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each trainer (default: %(default)s)")
    parser.add_argument("--only", choices=["trainer", "lit", "titan"], nargs="+", help="which peers (default: all)")
    parser.add_argument("--lora", type=int, metavar="RANK", help="train an adapter; only Trainer, with peft, can here")
    parser.add_argument("--malloc", action="store_true", help="give the peers our launcher's settings of malloc, too")
    parser.add_argument(
        "--profile", type=Path, metavar="FOLDER", help="also publish our last run as benchmarks.recipe.run does"
    )
    args = parser.parse_args()
    options, has_adapter = with_adapter(args.preset, args.lora), bool(args.lora)
    config = load_config(["--job.config_file", str(PRESETS[args.preset]), *options], 1)
    args.only = ["trainer"] if has_adapter else args.only
    asked = [name for name, (program, *_) in PEERS.items() if not args.only or Path(program).stem in args.only]
    absent = {name: why for name in asked if (why := why_not(name, config, torch.cuda.is_available()))}
    peers = [name for name in asked if name not in absent]
    for name in peers:
        set_up(*PEERS[name][:2])
    ours: list[dict[str, Any]] = []
    seen: dict[str, list[dict[str, Any]]] = {name: [] for name in peers}
    alike: dict[str, list[dict[str, Any]]] = {name: [] for name in peers}
    for repeat in range(args.repeats):
        is_last = repeat == args.repeats - 1
        ours.append(measure(args.preset, options, WARMUP, profile=args.profile is not None and is_last))
        print(f"this recipe: {describe(ours[-1])}", flush=True)
        for name in peers:
            if name not in absent:
                seen[name].append(run_peer(name, config, args.lora, args.malloc))
                print(f"{name}: {describe(seen[name][-1])}", flush=True)
                if why := seen[name][-1].get("failed"):
                    absent[name] = why
                elif seen[name][-1].get("dtype") == "bfloat16" != config.training.dtype:
                    alike[name].append(measure(args.preset, IN_BFLOAT16, WARMUP, profile=False))
    print(f"\n{args.preset}, {args.repeats} runs of each in turn, {os.cpu_count()} cores\n")
    print("| | tokens/s | ours / theirs | peak memory | ours / theirs |\n| --- | --- | --- | --- | --- |")
    for name, runs in {"this recipe": ours, **seen}.items():
        if name not in absent:
            print(f"| {name} | {compare(ours, runs)} |")
    for name, why in absent.items():
        print(f"\n{name}: {why}")
    for name, runs in seen.items():
        if setting := runs[-1].get("setting"):
            print(f"\n{name}: {setting}")
        if alike[name] and name not in absent:
            print(f"this recipe, all states in bfloat16: {describe(alike[name][-1])}")
            print(f"{name}, beside that: {compare(alike[name], runs)}")
    if args.profile:
        publish(args.preset, [], ours[-1], args.profile)
    raise SystemExit(1 if set(absent) & set(peers) else 0)


def with_adapter(preset: str, rank: int | None) -> list[str]:
    """The options that train an adapter of the preset's model, whose first weights are the base."""
    if rank is None:
        return []
    base = ROOT / "outputs/peers/base" / preset
    if not (base / "checkpoint/step-0").exists():
        saving = ["--checkpoint.enable", "--job.dump_folder", str(base), "--job.config_file", str(PRESETS[preset])]
        subprocess.run([sys.executable, "-m", "torchtitan", "seed_checkpoint", "--", *saving], cwd=ROOT, check=True)
    options = ["--lora.rank", str(rank), "--checkpoint.enable", "--checkpoint.initial_load_path", str(base)]
    return [*options, "--checkpoint.interval", "1000000"]


def describe(run: dict[str, Any]) -> str:
    """Describe one run. The line is printed when the run ends, so it is kept if the user stops the others."""
    return run.get("failed") or f"{run['tokens_per_second']:,.0f} tokens/s, {run['memory_gib']:.2f} GiB"


def compare(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> str:
    """Return the cells of a row: medians, and median ratios of runs that took place one after the other."""
    cells = []
    for key, form in (("tokens_per_second", "{:,.0f}"), ("memory_gib", "{:.2f} GiB")):
        cells.append(form.format(statistics.median(run[key] for run in theirs)))
        ratio = statistics.median(a[key] / b[key] for a, b in zip(ours, theirs, strict=True))
        cells.append(f"{ratio:.2f}")
    return " | ".join(cells)


if __name__ == "__main__":
    main()
