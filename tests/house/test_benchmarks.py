"""Where a step's time goes, by a trace that is known; what the comparison with other trainers prints."""

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.recipe import candidates
from benchmarks.recipe.peers import __main__ as peers
from benchmarks.recipe.peers import titan
from benchmarks.recipe.run import PRESETS, ROOT, summarize, watch_further_steps
from benchmarks.recipe.where import IDLE, OTHER, SORTS, shares
from torchtitan.root import PACKAGE

STEP = ("user_annotation", "ProfilerStep#9", 0, 100)
ON_A_CPU = [
    ("user_annotation", "ProfilerStep#8", -50, 50),
    ("cpu_op", "aten::mm", -40, 30),
    STEP,
    ("cpu_op", "aten::linear", 0, 50),
    ("cpu_op", "aten::mm", 10, 30),
    ("user_annotation", "Optimizer.step#AdamW.step", 60, 30),
    ("cpu_op", "aten::mul", 70, 10),
    ("cpu_op", "aten::silu", 90, 5),
]
ON_A_GPU = [
    ("gpu_user_annotation", "ProfilerStep#9", 5, 400),
    ("user_annotation", "ProfilerStep#8", -50, 50),
    ("kernel", "nvjet_tst_128x256", -40, 40),
    STEP,
    ("cpu_op", "aten::linear", 0, 45),  # the host's time is none of the device's
    ("user_annotation", "Optimizer.step#BFloat16AdamW.step", 90, 10),
    ("cuda_runtime", "cudaLaunchKernel", 91, 1, 7),
    ("user_annotation", "FSDP::post_backward_reduce", 50, 10),
    ("cuda_runtime", "cudaLaunchKernel", 51, 1, 8),
    ("kernel", "ncclDevKernel_AllGather", 0, 40),
    ("kernel", "nvjet_tst_128x256", 30, 40),
    ("kernel", "multi_tensor_apply_kernel", 70, 5, 8),
    ("kernel", "triton_poi_fused_add_addmm", 80, 10, 7),
    ("gpu_memcpy", "Memcpy HtoD", 95, 2),
]


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        (ON_A_CPU, {"matrix products": 0.5, "optimizer": 0.3, OTHER: 0.05, IDLE: 0.15}),
        (ON_A_GPU, {"communication": 0.35, "matrix products": 0.4, "optimizer": 0.1, "copies to the device": 0.02,
                    IDLE: 0.13}),
    ],
    ids=["CPU", "GPU"],
)  # fmt: skip
def test_a_steps_time_goes_where_its_trace_says(
    events: list[tuple[Any, ...]], expected: dict[str, float], tmp_path: Path
) -> None:
    trace = [
        {"ph": "X", "cat": kind, "name": name, "ts": begin, "dur": length, "tid": 1}
        | ({"args": {"correlation": launch[0]}} if launch else {})
        for kind, name, begin, length, *launch in events
    ]
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": [*trace, {"ph": "M", "name": "process_name"}]}))
    found = shares(tmp_path / "trace.json")
    assert list(found) == [*SORTS, OTHER, IDLE]
    assert {sort: share for sort, share in found.items() if share} == pytest.approx(expected)


def test_steps_that_are_logged_together_count_once_they_are_all_after_the_first_ones() -> None:
    seconds = {1: 90.0, 5: 80.0, 10: 4.0, 15: 2.0, 20: 3.0}  # the second is the mean of steps 2 to 5
    others = dict.fromkeys(("tokens_per_second", "tflops", "mfu", "memory_gib", "data_seconds", "loss"), 6.0)
    records = [{"step": step, "step_seconds": mean, **others} for step, mean in seconds.items()]
    figures = summarize(records, 90.0, warmup=5)
    assert (figures["step_seconds"], figures["tokens_per_second"]) == (3.0, 6.0)
    with pytest.raises(SystemExit, match="after the first 11 steps the run logged 1, but quartiles need at least 2"):
        summarize(records, 90.0, warmup=11)


@pytest.mark.parametrize(("steps", "log_freq", "last"), [(20, 1, 28), (30, 5, 41), (100, 10, 111)])
def test_steps_are_watched_after_all_that_count_and_the_last_after_a_logged_one(
    steps: int, log_freq: int, last: int
) -> None:
    keys = {"training.steps": steps, "metrics.log_freq": log_freq, "lr_scheduler.warmup_steps": 1}
    config = peers.load_config([f"--{key}={value}" for key, value in keys.items()])
    assert watch_further_steps(config)[:2] == ["--training.steps", str(last)]


def test_peers_that_cannot_run_or_fail_are_named_below_the_table(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(preset: str, options: list[str], warmup: int, profile: bool) -> dict[str, Any]:
        return {"tokens_per_second": 300.0 + 20 * len(options), "memory_gib": 1.0}

    answer = {"step_seconds": [9] * 5 + [1, 1], "memory_gib": 2, "setting": "all of it", "dtype": "bfloat16"}
    works, fails = tmp_path / "works.py", tmp_path / "fails.py"
    works.write_text(f"print({json.dumps(answer)!r})")
    fails.write_text("raise MemoryError('no room')")
    answers = {"works": (str(works), [], {}), "fails": (str(fails), [], {}), "titan": ("titan.py", [], {})}
    monkeypatch.setattr(peers, "PEERS", answers)
    monkeypatch.setattr(peers, "set_up", lambda *_: Path(sys.executable))
    monkeypatch.setattr(peers, "measure", run)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["peers", "--preset", "cpu-tiny", "--repeats", "2"])
    with pytest.raises(SystemExit) as exit_code:
        peers.main()
    assert exit_code.value.code == 1
    printed = capsys.readouterr().out
    assert "this recipe: 300 tokens/s, 1.00 GiB\nworks: 128 tokens/s, 2.00 GiB\nfails: MemoryError" in printed
    assert "| works | 128 | 2.34 | 2.00 GiB | 0.50 |" in printed
    assert "works: all of it\nthis recipe, all states in bfloat16: 380 tokens/s, 1.00 GiB\n" in printed
    assert "works, beside that: 128 | 2.97 |" in printed
    assert "fails: MemoryError: no room" in printed
    assert "titan: trains on GPUs only" in printed


def test_torchtitan_recomputes_what_it_must_to_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess:
        tried.append(json.loads(command[-1])["recompute"])
        fits = tried[-1] == "full"
        return subprocess.CompletedProcess(
            command, int(not fits), "{}\n", "" if fits else "torch.OutOfMemoryError: CUDA"
        )

    monkeypatch.setattr(titan.subprocess, "run", run)
    monkeypatch.setattr(sys, "argv", ["titan.py", "{}"])
    with pytest.raises(SystemExit) as exit_code:
        titan.main()
    assert (exit_code.value.code, tried) == (0, ["none", "selective", "full"])


def test_only_torchtitan_is_asked_for_float8() -> None:
    config = peers.load_config(["--job.config_file", str(PRESETS["gpu-8b-float8"])], 1)
    able = [name for name in peers.PEERS if not peers.why_not(name, config, has_gpu=True)]
    assert able == ["torchtitan 0.2.2, compiled"]


def test_docs_name_every_file_that_does_something_else_on_a_gpu() -> None:
    listed = (ROOT / "tests/recipe/gpu/README.md").read_text()
    places = [row.split("|")[1] for row in listed.splitlines() if row.startswith("| ")]
    for file in PACKAGE.rglob("*.py"):
        if re.search(r'torch\.cuda|"cuda"|is_cuda|cuda:nccl|"nvidia-smi"', file.read_text()):
            folder, stem = file.parent.relative_to(ROOT).as_posix().removeprefix("torchtitan").strip("/"), file.stem
            words = {stem, folder} - {""}
            assert any(all(re.search(rf"\b{word}\b", place) for word in words) for place in places), file


def test_all_candidates_for_a_step_run_on_a_cpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = ["gradients", "weights", "adamw", "attention", "output", *(["float8"] if find_spec("torchao") else [])]
    monkeypatch.setattr(sys, "argv", ["candidates", "--tiny", "--parts", *parts])
    candidates.main()
    torch.compiler.reset()
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| a")]
    assert len({row[0] for row in rows}) >= len(parts) and all(float(row[2]) > 0 for row in rows)


def test_the_script_for_a_gpu_refuses_a_misspelt_part() -> None:
    asked = os.environ | {"PARTS": "tests preset"}
    script = subprocess.run(
        ["benchmarks/recipe/on_gpu.sh"], cwd=ROOT, env=asked, capture_output=True, text=True, check=False
    )
    assert script.returncode == 2
    assert script.stderr == "PARTS = tests preset has preset; use some of tests, candidates, presets and planned\n"


@pytest.mark.all
@pytest.mark.slow
@pytest.mark.skipif(not (ROOT / "titan_planner").is_dir(), reason="its last part is the planner's")
@pytest.mark.timeout(300)
def test_the_script_for_a_gpu_runs_to_its_end_on_a_cpu(tmp_path: Path) -> None:
    asked = {"PYTHON": sys.executable, "PRESETS": "cpu-tiny", "OUT": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    asked["PARTS"] = "tests candidates presets planned"
    script = subprocess.run(
        ["benchmarks/recipe/on_gpu.sh"], cwd=ROOT, env=os.environ | asked, capture_output=True, text=True, check=False
    )
    assert script.returncode == 0, script.stdout + script.stderr
    assert "torchtitan 0.2.2, compiled: trains on GPUs only" in script.stdout
    (result,) = tmp_path.glob("cpu-tiny-*.json")
    assert set(json.loads(result.read_text())["figures"]["shares"]) == {*SORTS, OTHER, IDLE}
    assert len(json.loads((tmp_path / "planned.json").read_text())) == 8
    ended = script.stdout.partition("== ended\n")[2]
    assert [line.partition(" after")[0] for line in ended.splitlines()] == [
        f"{part}: exit code 0" for part in ("candidates", "cpu-tiny", "probe", "planned")
    ]
