"""The compare verb as a user types it: real runs of train.py, one after the other."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import started
from tests.tiny_runs import read_records

ROOT = Path(__file__).parents[3]
DEBUG_MODEL = (ROOT / "train_configs/debug_model.toml").read_text()
SHORT = ["--training.seq_len", "64", "--training.global_batch_size", "8", "--validation.no_enable"]


def start(folder: Path, b: str, *words: str) -> "subprocess.Popen[str]":
    """Start a comparison of the debug model with a changed one."""
    (folder / "a.toml").write_text(DEBUG_MODEL)
    (folder / "b.toml").write_text(b)
    files = [str(folder / name) for name in ("a.toml", "b.toml")]
    command = [sys.executable, "-m", "torchtitan", "compare", *files, "--out", str(folder / "out"), *words]
    pipe, environment = subprocess.PIPE, os.environ | {"OMP_NUM_THREADS": "1"}
    return started.Popen(command, cwd=ROOT, env=environment, stdout=pipe, stderr=pipe, text=True)


def compare(folder: Path, b: str, *words: str) -> tuple[int, str, str]:
    process = start(folder, b, *words)
    try:
        out, err = process.communicate(timeout=100)
    finally:
        process.send_signal(signal.SIGINT)  # in case it still runs
    return process.returncode, out, err


def test_two_layouts_of_one_training_are_alike_and_shown_in_text_and_curves(tmp_path: Path) -> None:
    sharded = DEBUG_MODEL.replace("local_batch_size = 8", "local_batch_size = 4", 1)
    sharded += "[parallelism]\ndata_parallel_shard_degree = 2\n"
    code, out, err = compare(tmp_path, sharded, "--steps", "4", "--", *SHORT)
    assert code == 0, out + err
    folder = tmp_path / "out"
    text = (folder / "compare.txt").read_text()
    assert text in out
    assert f"B  {tmp_path}/b.toml: dp_shard 2\n4 steps, global batch 8 x 64 tokens, seed 0 for both\n" in text
    assert "set what to train" not in text and "parallelism.data_parallel_shard_degree: A -1, B 2\n" in text
    assert text.endswith("ALIKE: loss within 1.0e-05 at every step; gradient norm within 1.0e-04 at every step\n")
    assert (folder / "compare.png").read_bytes().startswith(b"\x89PNG")
    a, b = read_records(folder / "a"), read_records(folder / "b")
    assert [record["step"] for record in a] == [record["step"] for record in b] == [1, 2, 3, 4]
    assert f"{a[-1]['loss']:.6f}  {b[-1]['loss']:10.6f}" in text
    assert [record["lr"] for record in a] == pytest.approx([3e-4, 6e-4, 9e-4, 12e-4])  # 10 warmup steps of 100
    assert "mesh dp_shard 2" in (folder / "b.log").read_text()


def test_a_run_that_fails_ends_the_comparison_with_the_end_of_its_log(tmp_path: Path) -> None:
    code, out, err = compare(tmp_path, DEBUG_MODEL, "--", *SHORT, "--training.dataset", "pydoc")
    assert code == 2, out + err
    assert f"error: run A ended with exit code 1; the end of {tmp_path}/out/a.log:\n  $ " in err
    assert "error: training: dataset = 'pydoc' is not a name known here" in err
    assert not (tmp_path / "out/b.log").exists() and not (tmp_path / "out/compare.txt").exists()


def test_ctrl_c_ends_all_ranks(tmp_path: Path) -> None:
    process = start(tmp_path, DEBUG_MODEL, "--world_size_a", "2", "--", *SHORT, "--training.local_batch_size", "4")
    written, end = tmp_path / "out/a/metrics.jsonl", time.monotonic() + 90
    while not written.is_file() or not written.stat().st_size:
        assert time.monotonic() < end and process.poll() is None
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=50)
    assert process.returncode == 130 and err == "stopped\n"
    size = written.stat().st_size
    time.sleep(0.5)
    assert written.stat().st_size == size
    assert len(read_records(tmp_path / "out/a")) < 100 and not (tmp_path / "out/b").exists()
