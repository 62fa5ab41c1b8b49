"""Reads a pipeline schedule of the user's own, a row of actions for each rank. No torch."""

import csv
import re
from pathlib import Path

from torchtitan.refusal import Refusal


def read_csv(path: str, degree: int) -> tuple[list[int], int, bool]:
    """Read a schedule file: each stage's rank, the number of microbatches, and whether backward is in two parts."""
    name = f'parallelism.pipeline_parallel_schedule_csv = "{path}"'
    try:
        with Path(path).open(newline="") as file:
            rows = list(csv.reader(file))
    except OSError as error:
        raise Refusal(f"{name} cannot be read: {error.strerror}") from None
    if len(rows) != degree:
        raise Refusal(f"{name} has {len(rows)} rows, one a rank; pipeline_parallel_degree = {degree} needs as many")
    holders: dict[int, int] = {}
    forwards: dict[int, set[int]] = {}
    in_two_parts = False
    for rank, row in enumerate(rows):
        actions = [action for cell in row for action in re.findall(r"(\d+)(F|B|I|W)(\d+)", cell)]
        for stage, kind, microbatch in actions:
            if holders.setdefault(int(stage), rank) != rank:
                raise Refusal(f"{name} has stage {stage} on rank {holders[int(stage)]} and on rank {rank}; use one")
            in_two_parts |= kind in "IW"
            if kind == "F":
                forwards.setdefault(int(stage), set()).add(int(microbatch))
    counts = {len(done) for done in forwards.values()}
    if not forwards or sorted(forwards) != list(range(len(holders))) or len(counts) > 1:
        raise Refusal(
            f"{name} does not take every microbatch forward on every stage; write actions as 0F0 (stage 0, forward, "
            f"microbatch 0), 0B0, or 0I0 and 0W0, for stages from 0 on"
        )
    return [holders[stage] for stage in range(len(holders))], counts.pop(), in_two_parts
