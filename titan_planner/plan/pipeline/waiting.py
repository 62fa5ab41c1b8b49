"""What a rank of a pipeline holds at each moment of a pass, as counts of layers, weights and messages. No torch.

The counts follow from the list of actions that the rank executes, and are the same whatever a layer's size is.
"""

from collections.abc import Iterator, Sequence
from functools import cache
from operator import add, mul

import numpy as np

from torchtitan.models.operations import Number

UNITS = ("layer", "table", "output")  # what FSDP gathers and scatters at once
# What is counted. Of each unit: its weights, its gradient before and after the scatter, and what a scatter makes of it.
COUNTED = (
    *(f"{what} {unit}" for what in ("gathered", "gradient", "scattered", "new", "summed") for unit in UNITS),
    *("of layer", "cast"),  # gradients that a layer's backward has in 16 bits
    *("waits", "backward", "message", "entering", "loss", "logits", "of output", "of table"),
)
_AT = {name.replace(" ", "_"): place for place, name in enumerate(COUNTED)}
_ACTIVE = 3  # stages of a rank whose weights torch keeps gathered: the next ones that run


def one_f_one_b(ranks: int, stages: int, microbatches: int, rank: int) -> list[tuple[str, int]]:
    """Kind and local stage of each action, in 1F1B and in its interleaved form."""
    at_once, total = microbatches // max(1, microbatches // ranks), stages * microbatches
    ahead = min(total, ranks - rank if stages == 1 else (stages - 1) * at_once + 2 * (ranks - 1 - rank))
    forward = [("F", i // at_once % stages) for i in range(total)]
    backward = [("B", stages - 1 - i // at_once % stages) for i in range(total)]
    pairs = zip(forward[ahead:], backward, strict=False)
    both = [action for f, b in pairs for action in ((b, f) if stages == 1 else (f, b))]
    return [*forward[:ahead], *both, *backward[total - ahead :]]


def first_rounds(microbatches: Number, ranks: Number) -> Number:
    """As many microbatches as there are in three rounds: later rounds are like the third."""
    return np.minimum(microbatches, 3 * (microbatches // np.maximum(1, microbatches // ranks)))


@cache
def moments(
    ranks: int, stages: int, microbatches: int, rank: int, layers: tuple[int, ...]
) -> tuple[list[str], np.ndarray]:
    """Names of the moments that may be the fullest, and their counts. `layers`: of each stage of the rank."""
    fullest: dict[tuple, list[int]] = {}
    for name, counts in _all(one_f_one_b(ranks, stages, microbatches, rank), layers, microbatches, rank, ranks):
        key = name, counts[_AT["logits"]], tuple(counts[: _AT["of_layer"]])
        if key not in fullest or counts[_AT["waits"]] > fullest[key][_AT["waits"]]:
            fullest[key] = counts
    return [key[0] for key in fullest], np.array(list(fullest.values()), dtype=float)


def _all(
    actions: Sequence[tuple[str, int]], layers: Sequence[int], microbatches: int, rank: int, ranks: int
) -> Iterator[tuple[str, list[int]]]:
    """Every moment that may be fuller than its neighbours."""
    stages, is_first, is_last = len(layers), rank == 0, rank == ranks - 1
    units = [[count, 0, 0] for count in layers]
    units[0][1], units[-1][2] = int(is_first), int(is_last)
    seen = dict[tuple, int]()  # of moments that differ in nothing else, what waits in the fullest so far
    live, done, gathered = [0] * stages, [0] * stages, active(actions)
    for place, (kind, stage) in enumerate(actions):
        ends, number, fresh = is_last and stage == stages - 1, layers[stage], done[stage] == 0
        live[stage] += kind == "F"
        waits, leaves = sum(map(mul, live, layers)), kind == "B" and done[stage] == microbatches - 1
        state = (
            kind,
            stage,
            place > ranks - rank - 1,
            *gathered[place],
            -1,
            *((n > 0) + (n == microbatches) for n in done),
        )
        if waits <= seen.get(state, -1) and not leaves:
            live[stage] -= kind == "B"
            done[stage] += kind == "B"
            continue
        seen[state] = waits
        now = [0] * len(COUNTED)
        for each in gathered[place]:
            now[:3] = map(add, now[:3], units[each])
        for each, count in enumerate(done):
            if count:
                at = 3 if count < microbatches else 6
                now[at : at + 3] = map(add, now[at : at + 3], units[each])
        now[_AT["waits"]] = waits
        # A stage's input is the buffer that received it, and its output waits too.
        now[_AT["message"]] = is_first * live[0] - is_last * live[-1]
        now[_AT["entering"]] = is_first * live[0]
        if kind == "F":
            if ends:  # torch holds the last output until the next, if the rank has one stage
                yield "the loss", _with(now, loss=1, logits=int(stages == 1 and place > ranks - rank - 1))
            continue
        if ends:
            yield "the output layer's backward", _with(now, loss=1, of_output=1)
        began = _with(now, logits=int(ends), gradient_output=int(ends and fresh))
        yield "a layer's backward", _with(began, backward=int(number > 0), of_layer=int(number > 0))
        added = number if fresh else 0
        if added:
            last = _with(began, waits=1 - number, gradient_layer=number - 1)
            yield "a layer's backward", _with(last, backward=1, of_layer=1)
            yield "a layer's first gradients", _with(last, waits=-1, gradient_layer=1, cast=1, message=3)
        if is_first and stage == 0:
            table = _with(began, waits=-number, gradient_layer=added, of_table=1)
            yield "the table's backward", _with(table, message=1)
            yield "the table's backward", _with(table, gradient_table=int(fresh))
        live[stage] -= 1
        done[stage] += 1
        if done[stage] == microbatches:
            sent = is_first * (stage == 0) - is_last * ends
            ended = _with(began, waits=-number, logits=-int(ends), message=-sent, entering=-is_first * (stage == 0))
            yield from _exchange(ended, units[stage], added)


def _exchange(now: list[int], units: list[int], added: int) -> Iterator[tuple[str, list[int]]]:
    """A stage's units are scattered one after another; each gives its gathered weights up first."""
    layers, table, output = units
    now = _with(now, gradient_layer=added, gradient_table=table if added else 0)
    order = ["table"] * table + ["layer"] * min(1, layers) + ["output"] * output
    for unit in order:
        one = {f"gathered_{unit}": -1, f"gradient_{unit}": 1, f"new_{unit}": 1}
        yield "the exchange of gradients", _with(now, **one)
        count = layers if unit == "layer" else 1
        now = _with(
            now,
            **{
                f"gathered_{unit}": -count,
                f"gradient_{unit}": -count,
                f"scattered_{unit}": count,
                f"summed_{unit}": count,
            },
        )


def _with(counts: list[int], **more: int) -> list[int]:
    found = counts.copy()
    for name, count in more.items():
        found[_AT[name]] += count
    return found


def active(actions: Sequence[tuple[str, int]]) -> list[list[int]]:
    """The stages whose weights are gathered at each action."""
    found, after = [], list[int]()
    for _, stage in reversed(actions):
        after = [stage, *(other for other in after if other != stage)]
        found.append(after[:_ACTIVE])
    return found[::-1]
