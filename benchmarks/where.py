"""Where a step's time goes, from a trace by torch's profiler: on a GPU of its kernels, on a CPU of its operations."""

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# The first whose words are in a kernel's or an operation's name, or in that of one around it, has its time.
SORTS = {
    "optimizer": r"Optimizer\.step|adam|multi_tensor",
    "attention": r"scaled_dot_product|flash|fmha|attention",
    "matrix products": r"gemm|cutlass|nvjet|wgmma|\bmm\b|addmm|bmm|matmul|linear|cublas",
    "communication": r"nccl|gloo|c10d|split_with_sizes_copy|chunk_cat|FSDP::(all_gather|post_backward)",
    "copies to the device": r"memcpy",
}
OTHER, IDLE = "other operations", "idle, and Python between operations"


def shares(trace: Path) -> dict[str, float]:
    """Each sort's part of the step that the trace is of."""
    events = [event for event in json.loads(trace.read_text())["traceEvents"] if event.get("ph") == "X"]
    step = next(event for event in events if str(event["name"]).startswith("ProfilerStep"))
    kernels = [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    operations = [
        event
        for event in events
        if event.get("cat") in ("cpu_op", "user_annotation") and event["tid"] == step["tid"] and event is not step
    ]
    times: Counter[str] = Counter()
    for names, microseconds in _kernels(kernels) if kernels else _operations(operations):
        times[_sort(names)] += microseconds
    times[IDLE] = max(0.0, step["dur"] - sum(times.values()))
    return {sort: times[sort] / step["dur"] for sort in [*SORTS, OTHER, IDLE]}


def _sort(names: list[str]) -> str:
    return next((sort for sort, words in SORTS.items() if any(re.search(words, n, re.I) for n in names)), OTHER)


def _kernels(events: list[dict[str, Any]]) -> Iterator[tuple[list[str], float]]:
    """Each kernel's name and time; of two that run at once, the later one's is what it runs longer."""
    busy_until = 0.0
    for event in sorted(events, key=lambda event: event["ts"]):
        end = event["ts"] + event["dur"]
        yield [event["name"]], max(0.0, end - max(event["ts"], busy_until))
        busy_until = max(busy_until, end)


def _operations(events: list[dict[str, Any]]) -> Iterator[tuple[list[str], float]]:
    """Each operation's name with those of the ones around it, and its time without that of the ones inside."""
    around: list[dict[str, Any]] = []
    for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
        while around and around[-1]["ts"] + around[-1]["dur"] <= event["ts"]:
            around.pop()
        if around:
            yield [outer["name"] for outer in around], -event["dur"]
        around.append(event)
        yield [outer["name"] for outer in around], event["dur"]
