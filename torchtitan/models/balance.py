"""Cuts a list of parts into stages. No torch."""

import itertools
from collections.abc import Callable, Sequence

from torchtitan.models.spec import Part

May = Callable[[int, int, int], bool]  # whether this stage may hold the parts from begin to end


def balance(parts: Sequence[Part], num_stages: int, may: May = lambda stage, begin, end: True) -> list[range] | None:
    """Consecutive ranges, the slowest as fast as possible, and among such cuts the largest as small as possible.

    Time is FLOPs, and size is parameters. None if there is no cut that `may` allows.
    """
    times = [0, *itertools.accumulate(part.flops for part in parts)]
    sizes = [0, *itertools.accumulate(part.parameters for part in parts)]
    fastest = _best_cut(times, num_stages, may)
    if fastest is None:
        return None
    limit = max(times[end] - times[begin] for begin, end in itertools.pairwise(fastest))
    smallest = _best_cut(sizes, num_stages, lambda s, b, e: times[e] - times[b] <= limit and may(s, b, e))
    return [range(begin, end) for begin, end in itertools.pairwise(smallest or fastest)]


def _best_cut(sums: list[int], num_stages: int, may: May) -> list[int] | None:
    """Where the stages begin and end, for the least largest sum of a stage."""
    best: dict[int, tuple[int, list[int]]] = {0: (0, [0])}
    for stage in range(num_stages):
        longer = {}
        for end in range(stage + 1, len(sums) - (num_stages - stage - 1)):
            found = [
                (max(worst, sums[end] - sums[begin]), [*ends, end])
                for begin, (worst, ends) in best.items()
                if begin < end and may(stage, begin, end)
            ]
            if found:
                longer[end] = min(found)
        best = longer
    return best[len(sums) - 1][1] if len(sums) - 1 in best else None
