"""How a step grows with the number of GPUs and with each axis, by the planner's closed forms; writes SVGs for the docs.

    PYTHONPATH=. python benchmarks/planner/growth.py docs/planner

Nothing here is measured. The GPUs are H100s in nodes of 8, as clusters/h100_1x8.toml describes them.
"""

import math
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

from titan_planner.plan.cluster import read_cluster
from titan_planner.plan.search import FILLED, Answer, Job, search
from torchtitan.models.families import load_run
from torchtitan.root import ROOT

MODELS = {"8B": "#2a78c8", "70B": "#d9822b", "405B": "#3a9a4b"}
BATCH = 2048  # sequences of 8,192 tokens, at every size
AXES = {"tp": "tensor parallelism", "pp": "pipeline", "cp": "context parallelism", "replicas": "replicas"}
WIDTH, HEIGHT, LEFT, BOTTOM = 640, 330, 70, 45

Line = list[tuple[float, float]]


def main(folder: Path) -> None:
    cluster = read_cluster(ROOT / "clusters/h100_1x8.toml")
    seconds, memory, mfu = ({name: Line() for name in MODELS} for _ in range(3))
    axes: dict[str, dict[str, Line]] = {axis: {name: Line() for name in MODELS} for axis in AXES}
    for name in MODELS:
        _, blueprint = load_run(["--job.config_file", str(ROOT / f"train_configs/llama3_{name.lower()}.toml")], None)
        job = Job(blueprint, BATCH, 8192, True, False, False, lambda tp, cp: tp <= 8 and cp <= 64, {})
        flops = blueprint.flops_per_token(8192) * BATCH * 8192
        for devices in (2**power for power in range(3, 15)):
            answer = search(job, replace(cluster, num_devices=devices), 1)
            if not answer.best:
                continue
            table, index = answer.tables[answer.best[0][0]], answer.best[0][1]
            total = float(table.total[index])
            seconds[name].append((devices, total))
            memory[name].append((devices, float(table.peak[index]) / 2**30))
            mfu[name].append((devices, 100 * flops / total / devices / cluster.machine.device.flops))
            if devices == 1024:
                for axis in AXES:
                    axes[axis][name] = by_degree(answer, axis, FILLED * cluster.memory_bytes)
    save(folder / "growth-seconds.svg", "Seconds of the fastest layout's step", "GPUs", seconds, log=True)
    save(folder / "growth-mfu.svg", "MFU of the fastest layout, %", "GPUs", mfu)
    save(folder / "growth-memory.svg", "GiB that the fastest layout's fullest rank holds", "GPUs", memory)
    for axis, said in AXES.items():
        title = f"Seconds of the fastest step on 1,024 GPUs, by the degree of {said}"
        save(folder / f"growth-{axis}.svg", title, "degree", axes[axis], log=True)


def by_degree(answer: Answer, axis: str, limit: float) -> Line:
    """The fastest layout that fits, for each degree of the axis."""
    best: dict[int, float] = {}
    for table in answer.tables:
        fits = table.peak <= limit
        for degree in np.unique(table.columns[axis][fits]).tolist():
            least = float(table.total[fits & (table.columns[axis] == degree)].min())
            best[degree] = min(best.get(degree, math.inf), least)
    return [(degree, best[degree]) for degree in sorted(best) if degree & (degree - 1) == 0]


def save(path: Path, title: str, below: str, lines: dict[str, Line], log: bool = False) -> None:
    """A line each, in the order of the colors; the horizontal axis doubles at each mark."""
    points = [point for line in lines.values() for point in line]
    first, last = (math.log2(pick(x for x, _ in points)) for pick in (min, max))
    low, high = (0.0, max(y for _, y in points) * 1.05)
    if log:
        low, high = math.floor(math.log10(min(y for _, y in points))), math.ceil(math.log10(max(y for _, y in points)))

    def place(x: float, y: float) -> tuple[float, float]:
        up = ((math.log10(y) if log else y) - low) / max(1e-9, high - low)
        return LEFT + (math.log2(x) - first) / max(1, last - first) * (WIDTH - LEFT - 90), HEIGHT - BOTTOM - up * 235

    marks = [10.0**power for power in range(int(low), int(high) + 1)] if log else [high * part / 4 for part in range(5)]
    parts = [f'<text x="{LEFT}" y="22" font-size="14">{title}</text>']
    for y in marks:
        _, top = place(2**first, y)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - 90}" y1="{top:.1f}" y2="{top:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{top + 4:.1f}" text-anchor="end">{y:,.4g}</text>')
    for x in sorted({x for x, _ in points}):
        at, _ = place(x, 10**low if log else low)
        parts.append(f'<text x="{at:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{x:,}</text>')
    parts.append(f'<text x="{(WIDTH - 20) / 2}" y="{HEIGHT - 6}" text-anchor="middle">{below}</text>')
    for color, (name, line) in zip(MODELS.values(), lines.items(), strict=False):
        if not line:
            continue
        path_points = " ".join("{:.1f},{:.1f}".format(*place(x, y)) for x, y in line)
        parts.append(f'<polyline points="{path_points}" fill="none" stroke="{color}" stroke-width="2"/>')
        for x, y in line:
            at, top = place(x, y)
            parts.append(f'<circle cx="{at:.1f}" cy="{top:.1f}" r="3" fill="{color}"><title>{y:.4g}</title></circle>')
        at, top = place(*line[-1])
        parts.append(f'<text x="{at + 8:.1f}" y="{top + 4:.1f}" fill="{color}">{name}</text>')
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif"'
    path.write_text(
        f'{head} font-size="11"><rect width="100%" height="100%" fill="white"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "docs/planner"))
