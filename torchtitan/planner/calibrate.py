"""Fits the planner's rates on measured runs: the most likely values under both the runs and their defaults."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from torchtitan.planner.cost import Rates

if TYPE_CHECKING:
    from torchtitan.planner.rows import Row

# How far a rate may lie from its default: the width of a bell in its logarithm. A fit weighs this against the rows.
_WIDTH = {"product": 0.5, "size": 0.7, "float8": 0.3, "attention": 0.6, "memory": 0.2, "unfused": 0.3, "inside": 0.2}
_WIDTH |= {"between": 0.2, "overlap": 0.5, "latency": 0.7, "hop": 0.7, "layer": 1.0, "optimizer": 0.3, "fsdp": 0.3}
_NOISE = 0.06  # what two publications of one layout differ by
_BYTES_WIDTH, _BYTES_NOISE = {"logits": 0.7, "reserved": 0.05, "pieces": 0.5}, 0.02
Residuals = Callable[[Mapping[str, float]], np.ndarray]  # of rates that moved by so much in their logarithms


def fit(rows: Sequence["Row"], most: int, given: Rates | None = None) -> tuple[Rates, tuple[str, ...]]:
    """The `most` rates that these rows say most about, fitted on them, and their names."""
    start = given or Rates()

    def residuals(moved: Mapping[str, float]) -> np.ndarray:
        rates = _moved(start, moved)
        return np.array([math.log(1 + row.error(rates)) / _NOISE for row in rows])

    moved = _most_likely(residuals, _WIDTH, most)
    return _moved(start, moved), tuple(moved)


def _most_likely(residuals: Residuals, widths: Mapping[str, float], most: int) -> dict[str, float]:
    zero = residuals({})
    says = {name: abs(residuals({name: width}) - zero).max() for name, width in widths.items()}
    chosen = sorted(widths, key=lambda name: (says[name], name), reverse=True)[:most]
    width = np.array([widths[name] for name in chosen])
    moved, small = np.zeros(len(chosen)), 1e-4

    def at(values: np.ndarray) -> np.ndarray:
        return residuals(dict(zip(chosen, values, strict=True)))

    for _ in range(8):
        now = at(moved)
        slopes = [(at(moved + small * np.eye(len(chosen))[i]) - now) / small for i in range(len(chosen))]
        matrix = np.vstack([np.array(slopes).T, np.diag(1 / width)])
        moved = moved - 0.9 * np.linalg.lstsq(matrix, np.concatenate([now, moved / width]), rcond=None)[0]
    return dict(zip(chosen, moved.tolist(), strict=True))


def _moved(rates: Rates, by: Mapping[str, float]) -> Rates:
    return replace(rates, **{name: getattr(rates, name) * math.exp(each) for name, each in by.items()})


def fit_bytes(rows: Sequence["Row"]) -> dict[str, float]:
    """What the software keeps of a logit, and what its allocator reserves of what is live, fitted on these rows."""

    def residuals(moved: Mapping[str, float]) -> np.ndarray:
        by = {name: math.exp(each) for name, each in moved.items()}
        return np.array(
            [math.log(row.bytes(**by) / row.memory_bytes) / _BYTES_NOISE for row in rows if row.memory_bytes]
        )

    return {name: math.exp(each) for name, each in _most_likely(residuals, _BYTES_WIDTH, len(rows)).items()}
