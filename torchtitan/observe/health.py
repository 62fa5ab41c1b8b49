"""What to do about losses and gradient norms that are not finite: a decision on numbers, and the words for it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torchtitan.refusal import Refusal

MOST_RANKS_SHOWN = 4


class NotFiniteError(Refusal):
    """Training ended on a loss or gradient norm that is not finite."""


@dataclass(frozen=True)
class Verdict:
    """What a window of steps means for the run."""

    skipped: tuple[int, ...]  # places in the window whose update was left out
    in_a_row: int  # skipped updates at the window's end, with those before it
    stop_at: int | None  # place in the window that ends the run
    reason: str = ""


def judge_window(
    losses: Sequence[float], gradient_norms: Sequence[float], *, skip: bool, in_a_row: int, most_in_a_row: int
) -> Verdict:
    """Stop at the first step that is not finite, or, where skipping is allowed, at the first one too many.

    Where skipping is allowed, a norm that is not finite has left its update out on the device. A loss alone that is not
    finite has not, so it always stops.
    """
    skipped: list[int] = []
    for i, (loss, norm) in enumerate(zip(losses, gradient_norms, strict=True)):
        if math.isfinite(loss) and math.isfinite(norm):
            in_a_row = 0
            continue
        what = f"loss is {loss}, gradient norm is {norm}"
        if not skip or math.isfinite(norm):
            return Verdict(tuple(skipped), in_a_row, i, what)
        skipped.append(i)
        in_a_row += 1
        if in_a_row > most_in_a_row:
            what += f"; {in_a_row} updates in a row are left out, training.max_consecutive_skips allows {most_in_a_row}"
            return Verdict(tuple(skipped), in_a_row, i, what)
    return Verdict(tuple(skipped), in_a_row, None)


def describe_stop(
    step: int,
    reason: str,
    update_left_out: bool,
    could_skip: bool,
    own_losses: Mapping[int, float],
    batches: Mapping[int, str],
) -> str:
    """The message that ends a run: the step, each rank to blame, and where its sequences were read."""
    blamed = [rank for rank, loss in own_losses.items() if not math.isfinite(loss)]
    skip = ', or set training.on_nonfinite = "skip"' if could_skip else ""
    where = f"on rank {', '.join(map(str, blamed))}" if blamed else "every rank's own loss is finite"
    lines = [
        f"step {step}: {reason} ({where}).",
        "This step's update was left out." if update_left_out else "This step's update was applied.",
        f"Look at the data below, or lower optimizer.lr{skip}.",
    ]
    shown = (blamed or list(batches))[:MOST_RANKS_SHOWN]
    lines += [f"rank {rank} read:\n{batches[rank]}" for rank in shown]
    return "\n".join(lines)
