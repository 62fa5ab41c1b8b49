"""Compares the facts of all nodes: finds what must be alike but differs, and GPUs that would slow the run."""

import statistics
from collections import defaultdict
from collections.abc import Sequence

from torchtitan.launch.preflight.facts import Facts

_SLOW = 0.7  # of the median
_TAKEN_MIB = 2048  # more than drivers and displays take
_MOST_LINES = 6  # of one kind of difference


def differences(nodes: Sequence[Facts]) -> list[str]:
    """Errors: each node's own problems, then everything that differs between nodes and must not, with the fix."""
    found = [f"{name_of(nodes, i)}: {problem}" for i, facts in enumerate(nodes) for problem in facts["problems"]]
    found += _differing(nodes, "launch", "set the same on all nodes")
    found += _differing(nodes, "code", "give all nodes the same checkout or image", shows_values=False)
    found += _differing(nodes, "config", "start all nodes with the same file and options")
    return found + _differing(nodes, "versions", "install the same on all nodes")


def gpu_notes(nodes: Sequence[Facts]) -> list[str]:
    """Notes on GPUs below 0.7 of their kind's median speed, which slow all others, and on memory already in use."""
    speeds, lines = defaultdict(list), []
    for rank, facts in enumerate(nodes):
        for i, device in enumerate(facts["devices"]):
            if "tflops" in device:
                speeds[device.get("name")].append((device["tflops"], rank, i))
            used = device.get("memory.used", "")
            if used.isdecimal() and int(used) > _TAKEN_MIB:
                lines.append(f"{name_of(nodes, rank)}: GPU {i} has {used} MiB in use by another program")
    for kind, of_kind in speeds.items():
        median = statistics.median(tflops for tflops, _, _ in of_kind)
        lines += [
            f"{name_of(nodes, rank)}: GPU {i} computes at {tflops:.0f} TFLOP/s, the median {kind} here at {median:.0f}"
            for tflops, rank, i in of_kind
            if tflops < _SLOW * median
        ]
    return lines


def _differing(nodes: Sequence[Facts], kind: str, fix: str, shows_values: bool = True) -> list[str]:
    lines = []
    for key in sorted({key for facts in nodes for key in facts[kind]}):
        holders = defaultdict(list)
        for i, facts in enumerate(nodes):
            holders[facts[kind].get(key)].append(i)
        if len(holders) == 1:
            continue
        words = list(holders) if shows_values else ["one", *["another"] * (len(holders) - 1)]
        shown = [
            f"{word or 'absent'} on {name_of(nodes, of[0]) if len(of) == 1 else in_short(of)}"
            for word, of in zip(words, holders.values(), strict=True)
        ]
        lines.append(f"{key}: {', '.join(shown)}; {fix}")
    more = [f"and {len(lines) - _MOST_LINES} more of this kind"] if len(lines) > _MOST_LINES else []
    return lines[:_MOST_LINES] + more


def in_short(ranks: Sequence[int]) -> str:
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"node{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:8]))}{more}"


def name_of(nodes: Sequence[Facts], rank: int) -> str:
    return f"node {rank} ({nodes[rank]['host']})"
