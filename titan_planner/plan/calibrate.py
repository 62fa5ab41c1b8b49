"""The most likely values of rates under what was measured and what was known of them before."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from titan_planner.plan.cost import Rates

Residuals = Callable[[Mapping[str, float]], np.ndarray]  # of rates that moved by so much in their logarithms


def most_likely(residuals: Residuals, widths: Mapping[str, float], most: int) -> dict[str, float]:
    """How far rates move in their logarithms, at the least sum of squares of residuals and of moves over widths.

    Only the `most` rates move that the residuals depend on most. A step changes a rate by a factor of e at most, and
    is halved until it gains: far from the answer, the slopes mislead.
    """
    zero = residuals({})
    says = {name: abs(residuals({name: width}) - zero).max() for name, width in widths.items()}
    chosen = sorted(widths, key=lambda name: (says[name], name), reverse=True)[:most]
    width = np.array([widths[name] for name in chosen])
    moved, small = np.zeros(len(chosen)), 1e-4

    def at(values: np.ndarray) -> np.ndarray:
        return np.concatenate([residuals(dict(zip(chosen, values, strict=True))), values / width])

    for _ in range(20):
        now = at(moved)
        slopes = [(at(moved + small * row) - now) / small for row in np.eye(len(chosen))]
        step = np.clip(np.linalg.lstsq(np.array(slopes).T, now, rcond=None)[0], -1.0, 1.0)
        while (at(moved - step) ** 2).sum() > (now**2).sum() and abs(step).max() > 1e-6:
            step = step / 2
        if abs(step).max() <= 1e-6:
            break
        moved = moved - step
    return dict(zip(chosen, moved.tolist(), strict=True))


def scaled(rates: Rates, by: Mapping[str, float]) -> Rates:
    return replace(rates, **{name: getattr(rates, name) * math.exp(each) for name, each in by.items()})
