"""The most likely values of rates under what was measured and what was known of them before."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from torchtitan.planner.cost import Rates

Residuals = Callable[[Mapping[str, float]], np.ndarray]  # of rates that moved by so much in their logarithms


def most_likely(residuals: Residuals, widths: Mapping[str, float], most: int) -> dict[str, float]:
    zero = residuals({})
    says = {name: abs(residuals({name: width}) - zero).max() for name, width in widths.items()}
    chosen = sorted(widths, key=lambda name: (says[name], name), reverse=True)[:most]
    width = np.array([widths[name] for name in chosen])
    moved, small = np.zeros(len(chosen)), 1e-4

    def at(values: np.ndarray) -> np.ndarray:
        return residuals(dict(zip(chosen, values, strict=True)))

    for _ in range(20):
        now = at(moved)
        slopes = [(at(moved + small * np.eye(len(chosen))[i]) - now) / small for i in range(len(chosen))]
        matrix = np.vstack([np.array(slopes).T, np.diag(1 / width)])
        step = np.linalg.lstsq(matrix, np.concatenate([now, moved / width]), rcond=None)[0]
        moved = moved - np.clip(0.9 * step, -1.0, 1.0)
    return dict(zip(chosen, moved.tolist(), strict=True))


def scaled(rates: Rates, by: Mapping[str, float]) -> Rates:
    return replace(rates, **{name: getattr(rates, name) * math.exp(each) for name, each in by.items()})
