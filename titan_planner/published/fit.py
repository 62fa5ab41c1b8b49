"""Fits the planner's rates on published runs: the most likely values under both the runs and their defaults."""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from titan_planner.plan.calibrate import most_likely, scaled
from titan_planner.plan.cost import Rates
from titan_planner.published.rows import Row

# How far a rate may lie from its default: the width of a bell in its logarithm. A fit weighs this against the rows.
_WIDTH = {"product": 0.5, "size": 0.7, "float8": 0.3, "attention": 0.6, "memory": 0.2, "unfused": 0.3, "inside": 0.2}
_WIDTH |= {"between": 0.2, "overlap": 0.5, "latency": 0.7, "hop": 0.7, "layer": 1.0, "optimizer": 0.3, "fsdp": 0.3}
_NOISE = 0.06  # what two publications of one layout differ by
_BYTES_WIDTH, _BYTES_NOISE = {"logits": 0.7, "reserved": 0.05, "pieces": 0.5}, 0.02


def fit(rows: Sequence[Row], most: int, given: Rates | None = None) -> tuple[Rates, tuple[str, ...]]:
    """The `most` rates that these rows say most about, fitted on them, and their names."""
    start = given or Rates()

    def residuals(moved: Mapping[str, float]) -> np.ndarray:
        rates = scaled(start, moved)
        return np.array([math.log(1 + row.error(rates)) / _NOISE for row in rows])

    moved = most_likely(residuals, _WIDTH, most)
    return scaled(start, moved), tuple(moved)


def fit_bytes(rows: Sequence[Row]) -> dict[str, float]:
    """What the software keeps of a logit, and what its allocator reserves of what is live, fitted on these rows."""

    def residuals(moved: Mapping[str, float]) -> np.ndarray:
        by = {name: math.exp(each) for name, each in moved.items()}
        return np.array(
            [math.log(row.bytes(**by) / row.memory_bytes) / _BYTES_NOISE for row in rows if row.memory_bytes]
        )

    return {name: math.exp(each) for name, each in most_likely(residuals, _BYTES_WIDTH, len(rows)).items()}
