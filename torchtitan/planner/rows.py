"""Predicts published runs, and fits the planner's rates on some of them.

Two kinds of files are read: Megatron-LM's (a [device], [[network]] levels, GPT shapes in the rows) and torchtitan's
(a table of [hardware], models by family and flavor).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import tomli

from torchtitan.models.families import find_spec
from torchtitan.models.operations import Share, Work
from torchtitan.planner import megatron
from torchtitan.planner.cost import Device, Layout, Machine, Rates, Seconds, step
from torchtitan.refusal import Refusal

_INSIDE = {"A100": 300e9, "H100": 450e9, "H200": 450e9, "B200": 900e9}  # NVLink, bytes/s in one direction
# How far a rate may lie from its default: the width of a bell in its logarithm. A fit weighs this against the rows.
_WIDTH = {"product": 0.5, "size": 0.7, "float8": 0.3, "attention": 0.6, "memory": 0.2, "unfused": 0.3, "inside": 0.2}
_WIDTH |= {"between": 0.2, "overlap": 0.5, "latency": 0.7, "hop": 0.7, "layer": 1.0, "optimizer": 0.3}
_NOISE = 0.06  # what two publications of one layout differ by


@dataclass(frozen=True)
class Row:
    """One measured run."""

    name: str
    group: str  # of runs that differ in little
    device: Device
    work: Work
    layout: Layout
    seconds: float

    def predict(self, rates: Rates) -> Seconds:
        return step(Machine(self.device, rates), self.work, self.layout)

    def error(self, rates: Rates) -> float:
        return float(self.predict(rates).total) / self.seconds - 1


def read_rows(path: Path) -> list[Row]:
    try:
        tables = tomli.loads(path.read_text())
    except (OSError, tomli.TOMLDecodeError) as error:
        raise Refusal(f"{path} cannot be read as TOML: {error}") from None
    if not tables.get("row"):
        raise Refusal(f"{path} has no [[row]]; docs/planner.md describes the two formats")
    read = _torchtitan if "hardware" in tables else _megatron
    try:
        return [read(tables, row) for row in tables["row"]]
    except KeyError as error:
        raise Refusal(f"{path} has a row or table without {error}; docs/planner.md describes the two formats") from None


def _megatron(tables: Mapping[str, Any], row: Mapping[str, Any]) -> Row:
    model = tables["model"]
    return Row(
        row["name"],
        row["name"].split()[0],
        megatron.device(tables),
        megatron.work(row, model["seq_len"], model["vocab_size"]),
        megatron.layout(row),
        row["step_seconds"],
    )


def _torchtitan(tables: Mapping[str, Any], row: Mapping[str, Any]) -> Row:
    sheet = tables["hardware"][row["hardware"]]
    name = sheet["name"].split()[0]
    between = sheet.get("between_nodes_gbit_per_gpu", 200) / 8 * 1e9
    inside = sheet.get("inside_gbytes_per_second", _INSIDE.get(name, 450e9) / 1e9) * 1e9
    device = Device(
        sheet["peak_bf16_tflops"] * 1e12, sheet["memory_gbps"] * 1e9, inside, between, sheet["devices_per_node"]
    )
    spec = find_spec(row["model"])
    if spec.operations is None:
        raise Refusal(f"{row['model']} does not say what it computes; give its ModelSpec operations")
    microbatches = row.get("microbatches", 1)
    layout = Layout(
        dp=row["dp_shard"],
        tp=row["tp"],
        pp=row["pp"],
        cp=row["cp"],
        microbatches=microbatches,
        stages_per_rank=row.get("stages_per_rank", 1),
        recompute=row["recompute"],
        compiled=row["compile"],
        float8=row["float8"] != "none",
        async_tp=row["async_tp"],
    )
    share = Share(row["local_batch"] / microbatches, row["seq_len"], row["tp"], row["cp"])
    work = spec.operations(spec.flavors[row["flavor"]], share)
    group = f"{row['model']} {row['flavor']}, {row['gpus']} GPUs, {row['source']}, {row['seq_len']}"
    return Row(str(row["id"]), group, device, work, layout, row["step_seconds"])


def fit(rows: Sequence[Row], most: int, given: Rates | None = None) -> tuple[Rates, tuple[str, ...]]:
    """The `most` rates that these rows say most about, fitted on them, and their names.

    Each rate has a default and a width. The fit is the most likely set under both these and the rows.
    """
    start = given or Rates()
    names = [field.name for field in fields(Rates)]
    widths = np.array([_WIDTH[name] for name in names])

    def residuals(moved: np.ndarray, chosen: Sequence[str]) -> np.ndarray:
        rates = _moved(start, chosen, moved)
        return np.array([math.log(1 + row.error(rates)) / _NOISE for row in rows])

    zero = residuals(np.zeros(0), ())
    says = [abs(residuals(np.array([width]), [name]) - zero).max() for name, width in zip(names, widths, strict=True)]
    chosen = tuple(name for _, name in sorted(zip(says, names, strict=True), reverse=True)[:most])
    width = np.array([_WIDTH[name] for name in chosen])
    moved, small = np.zeros(len(chosen)), 1e-4
    for _ in range(8):
        now = residuals(moved, chosen)
        slopes = [(residuals(moved + small * np.eye(len(chosen))[i], chosen) - now) / small for i in range(len(chosen))]
        matrix = np.vstack([np.array(slopes).T, np.diag(1 / width)])
        moved = moved - 0.9 * np.linalg.lstsq(matrix, np.concatenate([now, moved / width]), rcond=None)[0]
    return _moved(start, chosen, moved), chosen


def _moved(rates: Rates, names: Sequence[str], by: np.ndarray) -> Rates:
    return replace(rates, **{n: getattr(rates, n) * math.exp(each) for n, each in zip(names, by, strict=True)})
