"""Where a step's time goes, from a trace by torch's profiler: on a GPU of its kernels, on a CPU of its operations."""

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

# A kernel or operation counts for the first sort that matches its name or that of an operation around it.
SORTS = {
    "optimizer": r"Optimizer\.step|adam",
    "attention": r"scaled_dot_product|flash|fmha|attention|cudnn::fusion|dot_do_o|convert_dq",
    "matrix products": r"gemm|cutlass|nvjet|wgmma|\bmm\b|addmm|bmm|matmul|linear|cublas",
    "communication": r"nccl|gloo|c10d|split_with_sizes_copy|chunk_cat|FSDP::(all_gather|post_backward)",
    "copies to the device": r"memcpy HtoD",
}
OTHER, IDLE = "other operations", "idle, and Python between operations"
Event = dict[str, Any]


def shares(trace: Path) -> dict[str, float]:
    """Each sort's part of the step that the trace is of."""
    events = [event for event in json.loads(trace.read_text())["traceEvents"] if event.get("ph") == "X"]
    host = [event for event in events if event.get("cat") in ("cpu_op", "user_annotation")]
    step = next(event for event in host if str(event["name"]).startswith("ProfilerStep"))
    host.remove(step)
    kernels = [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    launches = [event for event in events if event.get("cat") in ("cuda_runtime", "cuda_driver")]
    own = [event for event in host if event["tid"] == step["tid"]]
    times: Counter[str] = Counter()
    for sort, microseconds in _kernels(kernels, _launched_by(host, launches)) if kernels else _operations(own):
        times[sort] += microseconds
    times[IDLE] = max(0.0, step["dur"] - sum(times.values()))
    return {sort: times[sort] / step["dur"] for sort in [*SORTS, OTHER, IDLE]}


def _sort(names: list[str]) -> str:
    return next((sort for sort, words in SORTS.items() if any(re.search(words, n, re.I) for n in names)), OTHER)


def _kernels(kernels: list[Event], launched_by: dict[int, list[str]]) -> Iterator[tuple[str, float]]:
    """Each kernel's sort and time; of two that overlap, the later counts only for what it runs beyond the earlier.

    Communication's is what it runs with nothing beside it.
    """
    of_sort: dict[bool, list[tuple[str, Event]]] = defaultdict(list)
    for kernel in sorted(kernels, key=lambda kernel: kernel["ts"]):
        # The compiler names a kernel after all that is in it, and so perhaps after a product beside it.
        names = [] if kernel["name"].startswith("triton_") else [kernel["name"]]
        sort = _sort(names + launched_by.get(kernel.get("args", {}).get("correlation"), []))
        of_sort[sort == "communication"].append((sort, kernel))
    busy: list[tuple[float, float]] = []
    for is_communication in (False, True):
        busy_until = 0.0
        for sort, kernel in of_sort[is_communication]:
            begin, end = max(kernel["ts"], busy_until), kernel["ts"] + kernel["dur"]
            if begin < end:
                beside = sum(max(0.0, min(end, e) - max(begin, b)) for b, e in busy) if is_communication else 0.0
                yield sort, end - begin - beside
                busy_until = end
                if not is_communication:
                    busy.append((begin, end))


def _launched_by(host: list[Event], launches: list[Event]) -> dict[int, list[str]]:
    """The operations around each launch, by the number that it shares with its kernel."""
    return {
        event["args"]["correlation"]: [outer["name"] for outer in around]
        for event, around in _nested([*host, *launches])
        if "correlation" in event.get("args", {})
    }


def _operations(events: list[Event]) -> Iterator[tuple[str, float]]:
    """Each operation's sort, and its time without that of the ones inside."""
    for event, around in _nested(events):
        names = [outer["name"] for outer in around]
        if names:
            yield _sort(names), -event["dur"]
        yield _sort([*names, event["name"]]), event["dur"]


def _nested(events: Iterable[Event]) -> Iterator[tuple[Event, list[Event]]]:
    """Each event with those around it in its thread."""
    threads: dict[Any, list[Event]] = defaultdict(list)
    for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
        around = threads[event["tid"]]
        while around and around[-1]["ts"] + around[-1]["dur"] <= event["ts"]:
            around.pop()
        yield event, around
        around.append(event)
