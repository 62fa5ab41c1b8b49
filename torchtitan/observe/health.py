"""Decides what a loss or gradient norm that is not finite means for the run, and writes the message that ends it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torchtitan.refusal import Refusal

MOST_RANKS_SHOWN = 4


class NotFiniteError(Refusal):
    """A loss or gradient norm that is not finite ended the training."""


@dataclass(frozen=True)
class Verdict:
    """What a window of steps means for the run."""

    skipped: tuple[int, ...]  # indices in the window whose update was skipped
    in_a_row: int  # skipped updates up to the window's end, also counting those just before the window
    stop_at: int | None  # index in the window of the step that ends the run
    reason: str = ""


def judge_window(
    losses: Sequence[float], gradient_norms: Sequence[float], *, skip: bool, in_a_row: int, most_in_a_row: int
) -> Verdict:
    """Stop at the first step that is not finite or, with `skip`, at the first skip beyond `most_in_a_row`.

    With `skip`, the device has skipped each update whose norm is not finite. A loss that is not finite with a finite
    norm was applied, so it always ends the run.
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
    """The message that ends a run: the step, the ranks whose own loss is not finite, and the documents they read."""
    blamed = [rank for rank, loss in own_losses.items() if not math.isfinite(loss)]
    skip = ', or set training.on_nonfinite = "skip"' if could_skip else ""
    where = f"on rank {', '.join(map(str, blamed))}" if blamed else "every rank's own loss is finite"
    lines = [
        f"step {step}: {reason} ({where}).",
        "This step's update was left out." if update_left_out else "This step's update was applied.",
        f"Inspect the documents below, or lower optimizer.lr{skip}.",
    ]
    shown = (blamed or list(batches))[:MOST_RANKS_SHOWN]
    lines += [f"rank {rank} read:\n{batches[rank]}" for rank in shown]
    return "\n".join(lines)
