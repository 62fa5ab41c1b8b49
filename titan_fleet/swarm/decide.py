"""What the syncer decides, as functions of what it knows. Each returns a reason, which the log shows."""

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

UNUSUAL = 10  # times the usual norm
NORMS_KEPT = 16
FEW_MEETINGS = 100
FAR, MEETINGS = 3.0, 1000  # an outer step of 7 times the sites' way, as published, suits long runs (docs/log.md)


class Answer(NamedTuple):
    yes: bool
    why: str


def is_due(arrived: Mapping[str, float], present: Collection[str], quorum: int, grace: float, now: float) -> Answer:
    """Whether to merge now. `arrived`: when each site's difference was complete; `present`: sites heard of lately."""
    if len(arrived) < quorum:
        return Answer(False, f"{len(arrived)} of at least {quorum} sites")
    if not (missing := sorted(set(present) - set(arrived))):
        return Answer(True, f"all {len(arrived)} sites")
    waited = now - sorted(arrived.values())[quorum - 1]
    if waited < grace:
        return Answer(False, f"waiting for {', '.join(missing)}, {grace - waited:.0f} s more")
    return Answer(True, f"{len(arrived)} of {len(present)} sites; {', '.join(missing)} did not come within {grace:g} s")


def is_usual(norm: float, usual: Sequence[float], others: Sequence[float] = ()) -> Answer:
    """Whether a difference of this norm may count, after those of these norms, beside the other sites' of the meeting.

    If the others' have grown as well, as when the learning rate warms up, nothing is unusual.
    """
    if norm != norm or norm == float("inf"):
        return Answer(False, "its difference is not finite")
    if len(usual) < 4:
        return Answer(True, "few differences so far")
    finite = [other for other in others if math.isfinite(other)]
    middle = max(statistics.median(usual), statistics.median(finite) if finite else 0.0)
    if norm > UNUSUAL * middle > 0:
        return Answer(
            False, f"its difference has the norm {norm:.3g}, {norm / middle:.0f} times the usual {middle:.3g}"
        )
    return Answer(True, f"norm {norm:.3g}")


def goes_far(method: str, rate: float, momentum: float, meetings: int) -> Answer:
    """Whether the outer step is too long for a run of so few meetings."""
    way = 1.0 if method == "average" else rate / max(1 - momentum, 1e-9)
    said = (
        f"{meetings} meetings are planned, and the outer step goes {way:.3g} times as far as the sites (swarm.outer_lr "
        "/ (1 - swarm.outer_momentum))"
    )
    if way > FAR and meetings < MEETINGS:
        return Answer(
            True,
            f"{said}; in trials of 90 meetings a swarm whose outer step goes 3.5 times as far ended with a loss 1.8 % "
            "higher than one whose step goes 1.75 times, and with 7 times it learned less than a site alone: use "
            'outer_momentum = 0.6 or method = "average", or a lower optimizer.lr',
        )
    return Answer(
        way > 1 and meetings <= FEW_MEETINGS,
        f'{said}; in trials of 50 and 90 meetings the mean alone ended with a loss 1 % lower: use method = "average"',
    )


def shares(tokens: Mapping[str, int]) -> dict[str, float]:
    """Each site's share of the merge, in the order of their names; the sum is 1."""
    total = sum(tokens.values())
    return {site: tokens[site] / total for site in sorted(tokens)}


def differing(ours: Mapping[str, object], theirs: Mapping[str, object]) -> list[str]:
    """What a site says otherwise than the run, in words."""
    return [
        f"{key} is {theirs.get(key)!r} at this site and {value!r} in the run"
        for key, value in ours.items()
        if theirs.get(key) != value
    ]


def where_to_begin(own_step: int, others: Collection[int], is_new: bool) -> int:
    """The step of the run for a site that is new to it, so that its learning rate is that of the run's tokens."""
    middle = statistics.median_low(others) if others else 0
    return middle if is_new and own_step == 0 else own_step


def older_copy(number: int, own: int, newest: int) -> str:
    """Why a site cannot go on where the syncer has an older anchor than the site."""
    return (
        f"this site has anchor {own} of fragment {number}, and this syncer's newest is {newest}, so its folder is an "
        "older copy. To keep what the sites have, serve another --out, and start the sites in new run folders with "
        "checkpoint.initial_load_path; to go on from the syncer's anchor, start them in new run folders without it"
    )
