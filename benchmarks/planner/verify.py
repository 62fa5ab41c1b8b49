"""Runs eight layouts of each of three small shapes twice, and says how well a plan ranks them.

python -m benchmarks.planner.verify clusters/cpu_1x2.toml
"""

import json
import subprocess
import sys
from pathlib import Path

SHAPES = {  # dim, layers, heads, hidden units
    "narrow": (128, 8, 4, 384),
    "debug": (256, 6, 8, 768),
    "wide": (512, 4, 8, 1408),
}
KEYS = ("dim", "n_layers", "n_heads", "hidden_dim")


def main(cluster: str) -> None:
    out = Path("outputs/verify")
    for name, shape in SHAPES.items():
        command = ["plan", "train_configs/debug_model.toml", "--cluster", cluster, "--verify", "3", "--others", "5"]
        command += ["--repeats", "2", "--steps", "7", "--minutes", "4", "--runs", str(out / name), "--"]
        command += ["--training.global_batch_size", "8", "--training.seq_len", "128"]
        for key, value in zip((*KEYS, "n_kv_heads"), (*shape, 4), strict=True):
            command += [f"--model.{key}", str(value)]
        subprocess.run([sys.executable, "-m", "torchtitan", *command], check=True)
    for name in SHAPES:
        found = json.loads((out / name / "verify.json").read_text(encoding="utf-8"))
        tau, regret, spread = (found[key] for key in ("kendall_tau", "regret", "spread_of_repeats"))
        holds = None not in (tau, regret) and tau >= 0.8 and regret <= max(0.05, spread) and not found["failed"]
        print(f"{name}: tau {tau}, regret {regret}, spread {spread:.3f}, {found['failed']} failed: holds is {holds}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "clusters/cpu_1x2.toml")
