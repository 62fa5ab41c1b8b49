"""Sorts a step's time from a trace of torch's profiler: the kernels on a GPU, the operations on a CPU."""

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

# A kernel or operation belongs to the first sort that matches its own name or the name of an operation around it.
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
    """Return each sort's share of a step: on a GPU of the last step in the trace, on a CPU of the fastest possible one.

    On a CPU each operation counts with the least time it took in any step. The profiler's own records take the place
    of tensors in memory, so in some steps an operation waits for new memory; an unprofiled step does not.
    """
    events = [event for event in json.loads(trace.read_text())["traceEvents"] if event.get("ph") == "X"]
    host = [event for event in events if event.get("cat") in ("cpu_op", "user_annotation")]
    kernels = [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    launches = [event for event in events if event.get("cat") in ("cuda_runtime", "cuda_driver")]
    steps = sorted((event for event in host if "ProfilerStep" in event["name"]), key=lambda event: event["ts"])
    host = [event for event in host if event not in steps]
    times: Counter[str] = Counter()
    if kernels:
        last = steps[-1]
        kernels = [kernel for kernel in kernels if kernel["ts"] >= last["ts"]]
        for sort, microseconds in _kernels(kernels, _launched_by(host, launches)):
            times[sort] += microseconds
        times[IDLE] = max(0.0, last["dur"] - sum(times.values()))
    else:
        watched = [_operations(host, step) for step in steps]
        for operation, (sort, _) in watched[-1].items():
            times[sort] += min(others[operation][1] for others in watched if operation in others)
        idle = (step["dur"] - sum(own for _, own in done.values()) for step, done in zip(steps, watched, strict=True))
        times[IDLE] = min(idle)
    return {sort: times[sort] / sum(times.values()) for sort in [*SORTS, OTHER, IDLE]}


def _sort(names: list[str]) -> str:
    return next((sort for sort, words in SORTS.items() if any(re.search(words, n, re.I) for n in names)), OTHER)


def _kernels(kernels: list[Event], launched_by: dict[int, list[str]]) -> Iterator[tuple[str, float]]:
    """Yield each kernel's sort and time. Where two kernels overlap, the later one counts only after the earlier ends.

    Communication counts only while no other kernel runs.
    """
    of_sort: dict[bool, list[tuple[str, Event]]] = defaultdict(list)
    for kernel in sorted(kernels, key=lambda kernel: kernel["ts"]):
        # The compiler names a fused kernel after its operations, which may include a product that it does not compute.
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
    """Return the operations around each launch, keyed by the correlation number that launch and kernel share."""
    return {
        event["args"]["correlation"]: [outer["name"] for outer in around]
        for event, around in _nested([*host, *launches])
        if "correlation" in event.get("args", {})
    }


def _operations(host: list[Event], step: Event) -> dict[tuple[str, int], tuple[str, float]]:
    """Return the sort and the own time of each operation in a step, keyed by name and count of earlier ones."""
    inside = [e for e in host if e["tid"] == step["tid"] and step["ts"] <= e["ts"] < step["ts"] + step["dur"]]
    before: Counter[str] = Counter()
    times: dict[tuple[str, int], tuple[str, float]] = {}
    keys: dict[int, tuple[str, int]] = {}
    for event, around in _nested(inside):
        keys[id(event)] = key = (event["name"], before[event["name"]])
        before[event["name"]] += 1
        times[key] = _sort([*(outer["name"] for outer in around), event["name"]]), event["dur"]
        if around:
            outer = keys[id(around[-1])]
            times[outer] = times[outer][0], times[outer][1] - event["dur"]
    return times


def _nested(events: Iterable[Event]) -> Iterator[tuple[Event, list[Event]]]:
    """Yield each event with the events that enclose it in its thread."""
    threads: dict[Any, list[Event]] = defaultdict(list)
    for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
        around = threads[event["tid"]]
        while around and around[-1]["ts"] + around[-1]["dur"] <= event["ts"]:
            around.pop()
        yield event, around
        around.append(event)
