"""Where a step's time goes, by a trace that is known."""

import json
from pathlib import Path

import pytest

from benchmarks.where import IDLE, OTHER, SORTS, shares

STEP = ("user_annotation", "ProfilerStep#9", 0, 100)
ON_A_CPU = [
    STEP,
    ("cpu_op", "aten::linear", 0, 50),
    ("cpu_op", "aten::mm", 10, 30),
    ("user_annotation", "Optimizer.step#AdamW.step", 60, 30),
    ("cpu_op", "aten::mul", 70, 10),
    ("cpu_op", "aten::silu", 90, 5),
]
ON_A_GPU = [
    STEP,
    ("cpu_op", "aten::linear", 0, 90),  # the host's time is none of the device's
    ("kernel", "ncclDevKernel_AllGather", 0, 40),
    ("kernel", "nvjet_tst_128x256", 30, 40),
    ("kernel", "multi_tensor_apply_kernel", 80, 10),
    ("gpu_memcpy", "Memcpy HtoD", 95, 2),
]


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        (ON_A_CPU, {"matrix products": 0.5, "optimizer": 0.3, OTHER: 0.05, IDLE: 0.15}),
        (ON_A_GPU, {"communication": 0.4, "matrix products": 0.3, "optimizer": 0.1, "copies to the device": 0.02,
                    IDLE: 0.18}),
    ],
    ids=["CPU", "GPU"],
)  # fmt: skip
def test_a_steps_time_goes_where_its_trace_says(
    events: list[tuple[str, str, int, int]], expected: dict[str, float], tmp_path: Path
) -> None:
    trace = [
        {"ph": "X", "cat": kind, "name": name, "ts": begin, "dur": length, "tid": 1}
        for kind, name, begin, length in events
    ]
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": [*trace, {"ph": "M", "name": "process_name"}]}))
    found = shares(tmp_path / "trace.json")
    assert list(found) == [*SORTS, OTHER, IDLE]
    assert {sort: share for sort, share in found.items() if share} == pytest.approx(expected)
