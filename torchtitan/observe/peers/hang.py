"""Explains a hang: reads where each rank is from its stack, finds the ranks that the others wait for, and says so."""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from torchtitan.root import PACKAGE

_PROJECT = PACKAGE.parent
# Python files whose functions wait for other ranks.
_WAITS = (
    "torch/distributed/distributed_c10d.py",
    "torch/distributed/_functional_collectives.py",
    "torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py",
    "torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py",
)
_MOST_SHOWN = 4


@dataclass(frozen=True)
class Whereabouts:
    """The place a rank has reached."""

    step: int
    collective: str  # the call in which the rank waits for others; empty if it does not wait
    place: str  # the innermost line of this project
    error: str = ""  # the error of a collective that failed

    def __str__(self) -> str:
        return f"step {self.step}, " + (f"in {self.collective}, called from " if self.collective else "") + self.place


def locate(step: int, stack: Iterable[tuple[FrameType, int]], error: str = "") -> Whereabouts:
    """Read a stack, innermost frame first."""
    collective = place = ""
    for frame, line in stack:
        file, function = frame.f_code.co_filename, frame.f_code.co_name
        if not collective and file.endswith(_WAITS):
            collective = function
        ours = Path(file).is_relative_to(_PROJECT) and "site-packages" not in file  # .venv may be inside the project
        if ours and Path(file).parent.name != "peers":
            place = f"{Path(file).relative_to(_PROJECT)}:{line} ({function})"
            break
    return Whereabouts(step, collective, place or "code outside this project", error)


def find_laggards(known: Mapping[int, Whereabouts], world_size: int) -> tuple[list[int], str]:
    """The ranks that the others wait for, and the sign that gives them away; the surest sign comes first."""
    silent = [rank for rank in range(world_size) if rank not in known]
    if silent:
        return silent, "no answer"
    outside = [rank for rank, where in known.items() if not where.collective]
    if outside:
        return outside, "in no collective"
    newest = max(where.step for where in known.values())
    behind = [rank for rank, where in known.items() if where.step < newest]
    if behind:
        return behind, "at an earlier step"
    calls = {rank: (where.collective, where.place) for rank, where in known.items()}
    usual, count = Counter(calls.values()).most_common(1)[0]
    elsewhere = [rank for rank, call in calls.items() if call != usual]
    return (elsewhere, "not in the collective of most") if elsewhere and 2 * count > world_size else ([], "")


def describe(known: Mapping[int, Whereabouts], processes: Mapping[int, str], seconds: float, folder: Path) -> str:
    """The message of a hang: which ranks lag, where each rank is, and where to look next."""
    laggards, sign = find_laggards(known, len(processes))
    waits = Counter(where.collective for rank, where in known.items() if rank not in laggards and where.collective)
    step = max(where.step for where in known.values())
    verb = "lags" if len(laggards) == 1 else "lag"
    blamed = f"{ranges(laggards)} {verb} ({sign}), others wait" if laggards else "no rank lags, all wait for each other"
    lines = [f"no progress for {seconds:.0f} s at step {step}: {blamed} in {' and '.join(waits) or 'no collective'}"]
    lines += [f"  rank {rank} is {processes[rank]}" for rank in laggards[:_MOST_SHOWN]]
    together = defaultdict(list)
    for rank in sorted(known, key=lambda rank: (rank not in laggards, rank)):
        together[str(known[rank])].append(rank)
    # A laggard that answered is alive. The errors of the others only follow from its absence, so they are not shown.
    late = bool(laggards) and laggards[0] in known
    for where, ranks in together.items():
        error = "" if late else known[ranks[0]].error
        lines.append(f"  {ranges(ranks)}: {where}" + (f": {error}" if error else ""))
    if len(known) < len(processes):
        lines.append("  a process without an answer has ended, is stopped, or is in a call that holds Python's lock")
    return "\n".join([*lines, f"  each rank's stacks: {folder}/rank_N.txt; what to do: docs/recipe/debugging.md"])


def ranges(ranks: Collection[int]) -> str:
    """`ranks 0-2, 5` for 0, 1, 2, 5."""
    parts: list[list[int]] = []
    for rank in sorted(ranks):
        if parts and parts[-1][-1] == rank - 1:
            parts[-1][1:] = [rank]
        else:
            parts.append([rank])
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join("-".join(map(str, part)) for part in parts)
