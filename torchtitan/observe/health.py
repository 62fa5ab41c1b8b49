"""Decides what a loss or gradient norm that is not finite means for the run."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torchtitan.refusal import Refusal


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
    losses: Sequence[float],
    gradient_norms: Sequence[float],
    *,
    skip: bool,
    in_a_row: int,
    most_in_a_row: int,
    overflows: bool = False,
) -> Verdict:
    """Stop at the first step that is not finite or, with `skip`, at the first skip beyond `most_in_a_row`.

    With `skip`, the device has skipped each update whose norm is not finite. A loss that is not finite with a finite
    norm was applied, so it always ends the run. With float16 a norm `overflows` now and then, which is no fault.
    """
    skipped: list[int] = []
    for i, (loss, norm) in enumerate(zip(losses, gradient_norms, strict=True)):
        if math.isfinite(loss) and math.isfinite(norm):
            in_a_row = 0
            continue
        what = f"loss is {loss}, gradient norm is {norm}"
        if math.isfinite(norm) or not (skip or (overflows and math.isfinite(loss))):
            return Verdict(tuple(skipped), in_a_row, i, what)
        skipped.append(i)
        in_a_row += 1
        if in_a_row > most_in_a_row:
            what += f"; {in_a_row} updates in a row are left out, training.max_consecutive_skips allows {most_in_a_row}"
            return Verdict(tuple(skipped), in_a_row, i, what)
    return Verdict(tuple(skipped), in_a_row, None)
