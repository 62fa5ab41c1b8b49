"""The compare verb without its runs: differences, verdict, text, commands and refusals."""

import math
import re
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from torchtitan.__main__ import main
from torchtitan.config.schema import Parallelism
from torchtitan.tools.compare import verb as compare
from torchtitan.tools.compare.report import Comparison, compare_records, describe, differing_keys, draw
from torchtitan.tools.compare.runs import ComparedRun, infer_world_size, plan_runs

BATCH = "[training]\nglobal_batch_size = 8\nsteps = 300\n"


def records(losses: list[float | None], norms: list[float | None] | None = None) -> list[dict[str, Any]]:
    norms = norms or [1.0] * len(losses)
    return [{"step": i + 1, "loss": x, "grad_norm": y} for i, (x, y) in enumerate(zip(losses, norms, strict=True))]


def compared(a: list[dict[str, Any]], b: list[dict[str, Any]], bound: float = 1e-5) -> Comparison:
    return compare_records(a, b, loss_bound=bound, norm_bound=1e-4)


def planned(folder: Path, a: str, b: str, *options: str, steps: int | None = None, ranks_b: int | None = None) -> Any:
    """Plan both runs from two files with this text."""
    for name, text in [("a.toml", a), ("b.toml", b)]:
        (folder / name).write_text(text)
    files = {"a": str(folder / "a.toml"), "b": str(folder / "b.toml"), "out": str(folder / "out")}
    return plan_runs(Namespace(**files, steps=steps, world_size_a=None, world_size_b=ranks_b), options)


def last_values(run: ComparedRun) -> dict[str, str]:
    """The values that the run's command line sets; the last one wins."""
    pairs = zip(run.options, [*run.options[1:], ""], strict=True)
    return {name: value for name, value in pairs if name.startswith("--") and not value.startswith("--")}


def test_a_difference_is_relative_to_the_larger_of_both() -> None:
    comparison = compared(records([4.0, 2.0, 0.0], [1.0, 2.0, 0.0]), records([4.0, 4.0, 0.0], [1.0, 1.0, 1e-9]))
    assert comparison.loss.values == [0.0, 0.5, 0.0] and comparison.norm.values == [0.0, 0.5, 1.0]


def test_a_value_that_is_not_finite_equals_only_another_such() -> None:
    comparison = compared(records([None, None, 1.0]), records([None, 1.0, None]))
    assert comparison.loss.values == [0.0, math.inf, math.inf]


def test_the_verdict_names_the_first_step_over_a_bound() -> None:
    a, b = records([8.0, 7.0, 6.0], [1.0, 1.0, 1.0]), records([8.0, 7.0 * (1 + 2e-5), 5.0], [1.0, 1.0, 1 + 5e-5])
    assert compared(a, a).alike
    assert compared(a, a).verdict() == (
        "ALIKE: loss within 1.0e-05 at every step; gradient norm within 1.0e-04 at every step"
    )
    assert not compared(a, b).alike
    assert compared(a, b).verdict() == (
        "DIFFERENT: loss over 1.0e-05, first at step 2; gradient norm within 1.0e-04 at every step"
    )
    assert compared(a, b, bound=0.2).alike
    assert not compared(a, a, bound=math.nan).alike


@pytest.mark.parametrize(
    ("b", "message"),
    [(records([1.0]), "A has records of 2 steps up to 2 and B of 1 steps up to 1"), ([], "and B of no step")],
)
def test_runs_of_different_steps_are_not_compared(b: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        compared(records([1.0, 1.0]), b)


def test_a_long_run_is_shown_in_a_few_rows_with_those_that_matter(tmp_path: Path) -> None:
    a, b = planned(tmp_path, BATCH, BATCH)
    losses = [8.0 - i / 100 for i in range(300)]
    other = [x + {40: 1e-3, 222: 0.5}.get(i, 0) for i, x in enumerate(losses)]
    text = describe(a, b, compared(records(losses), records(other)))
    rows = [line.split() for line in text.splitlines() if line[:4].strip().isdecimal() and "." in line]
    assert len(rows) <= 13
    assert {"1", "300", "41", "223"} <= {row[0] for row in rows}
    assert ["223", "5.780000", "6.280000", "8.0e-02", "0.0e+00"] in rows
    assert "  loss:          8.0e-02 at step 223\n  gradient norm: none, the same at every step\n" in text
    assert text.endswith("first at step 41; gradient norm within 1.0e-04 at every step\n")

    short = describe(a, b, compared(records(losses[:5]), records([*losses[:4], None])))
    assert [row.split()[0] for row in short.split("\n\n")[1].splitlines()] == ["step", "1", "2", "3", "4", "5"]
    assert "5    7.960000         nan         inf           0.0e+00" in short


def test_keys_that_differ_are_told_apart_by_whether_a_loss_may_depend_on_them(tmp_path: Path) -> None:
    other = (
        '[parallelism]\ntensor_parallel_degree = 2\n[compile]\nbackend = "eager"\n'
        "[optimizer]\nlr = 1e-3\n[training]\nlocal_batch_size = 4\nglobal_batch_size = 8\nsteps = 300\nseq_len = 64\n"
    )
    a, b = planned(tmp_path, "[training]\nsteps = 300\n", other)
    text = describe(a, b, compared(records([1.0]), records([1.0])))
    assert f"A  {tmp_path}/a.toml: 1 rank\nB  {tmp_path}/b.toml: tp 2\n1 steps, global batch 8 x 2048 tokens" in text
    how, what = text.split("keys that differ and set ")[1:]
    assert how.splitlines()[1:-1] == [
        "  training.local_batch_size: A 8, B 4",
        "  parallelism.tensor_parallel_degree: A 1, B 2",
        '  compile.backend: A "inductor", B "eager"',
    ]
    # global_batch_size is -1 in A, which resolves to the same 8.
    assert what.split("\n\n")[0].splitlines()[1:] == [
        "  optimizer.lr: A 0.0008, B 0.001",
        "  training.seq_len: A 2048, B 64",
    ]


@pytest.mark.parametrize(("loss", "code"), [(2.0, 0), (2.1, 1)])
def test_the_exit_code_says_whether_both_are_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loss: float, code: int
) -> None:
    of_runs = iter([records([2.0]), records([loss])])
    monkeypatch.setattr(compare, "train", lambda _: next(of_runs))
    planned(tmp_path, "", "")
    files = {name: str(tmp_path / f"{name}.toml") for name in "ab"} | {"out": str(tmp_path / "out")}
    bounds = {"steps": None, "world_size_a": None, "world_size_b": None, "loss_bound": 1e-5, "norm_bound": 1e-4}
    assert compare.run(Namespace(**files, **bounds), []) == code


@pytest.mark.parametrize(
    ("degrees", "ranks"),
    [
        ({}, 1),
        ({"data_parallel_shard_degree": 4}, 4),
        ({"tensor_parallel_degree": 2, "context_parallel_degree": 3, "data_parallel_replicate_degree": 2}, 12),
    ],
)
def test_the_number_of_ranks_follows_from_the_degrees(degrees: dict[str, int], ranks: int) -> None:
    assert infer_world_size(Parallelism(**degrees)) == ranks


def test_both_runs_get_the_seed_of_a_and_folders_of_their_own(tmp_path: Path) -> None:
    other = BATCH + "local_batch_size = 4\n[metrics]\nlog_freq = 5\n"
    a, b = planned(tmp_path, BATCH + "[debug]\nseed = 7\n", other, ranks_b=2)
    assert [run.config.debug.seed for run in (a, b)] == [7, 7]
    assert [run.config.metrics.log_freq for run in (a, b)] == [1, 1]
    assert [run.folder for run in (a, b)] == [tmp_path / "out/a", tmp_path / "out/b"]
    assert a.command == [sys.executable, "train.py", *a.options]
    assert b.command[1:3] == ["-m", "torchtitan.launch.ranks"] and b.command[6:8] == ["--nproc_per_node=2", "train.py"]
    c, d = planned(tmp_path, BATCH, BATCH + "[debug]\nseed = 7\n")
    assert [run.config.debug.seed for run in (c, d)] == [0, 0]


def test_runs_begin_with_the_weights_their_files_name_and_save_nothing(tmp_path: Path) -> None:
    saving = '[checkpoint]\nenable = true\nfolder = "s3://b/r"\nload_step = 3\n'
    saving += "last_save_model_only = true\nlast_save_in_hf = true\n"
    a, b = planned(tmp_path, BATCH, BATCH + saving + 'initial_load_path = "x"\n')
    assert not a.config.checkpoint.enable and b.config.checkpoint.enable and b.config.checkpoint.load_only
    ours = b.config.checkpoint
    assert (ours.folder, ours.load_step, ours.initial_load_path) == ("none", -1, "x")
    how, what = differing_keys(a, b)
    assert what == ['checkpoint.initial_load_path: A null, B "x"'] and "checkpoint.enable: A false, B true" in how


def test_fewer_steps_are_the_first_of_the_same_learning_rate_curve(tmp_path: Path) -> None:
    scheduled = BATCH + "[lr_scheduler]\ntotal_steps = 1000\n"
    for run, total in zip(planned(tmp_path, BATCH, scheduled, steps=5), (300, 1000), strict=True):
        assert (run.config.training.steps, run.config.lr_scheduler.total_steps) == (5, total)
        assert last_values(run)["--training.steps"] == "5"
    a, _ = planned(tmp_path, BATCH, BATCH, steps=400)
    assert (a.config.training.steps, a.config.lr_scheduler.total_steps) == (400, None)


@pytest.mark.parametrize(
    ("b", "words", "message"),
    [
        ("[training]\nsteps = 200\n", [], "training.steps = 300 in A and 200 in B, .* as with --steps 200"),
        (
            BATCH + "[parallelism]\ndata_parallel_shard_degree = 3",
            ["--", "--training.global_batch_size=-1"],
            r"comes to 8 in A \(1 rank\) and 24 in B \(dp_shard 3\), .* as with -- --training.global_batch_size 24",
        ),
        (
            BATCH,
            ["--", "--job.config-file=c.toml"],
            "--job.config-file=c.toml after -- would be the same for both",
        ),
        (BATCH, ["--", "--job.dump_folder", "x"], "--job.dump_folder after -- would be the same for both runs"),
        (BATCH, ["--world_size_b", "0"], "--world_size_b = 0, but a run has at least one rank; use 1 or more"),
        (BATCH, ["--world_size_b", "3"], "b.toml: 1 mistake"),
        (BATCH + "stepz = 1\n", [], "training.stepz = 1: unknown key"),
        (BATCH, ["--out", __file__], "--out = .* cannot be created: File exists; name another folder"),
    ],
    ids=["steps", "batch", "file", "folder", "no ranks", "ranks", "mistake", "out"],
)
def test_pairs_that_cannot_be_compared_are_refused_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], b: str, words: list[str], message: str
) -> None:
    (tmp_path / "a.toml").write_text(BATCH)
    (tmp_path / "b.toml").write_text(b)
    out = tmp_path / "out"
    with pytest.raises(SystemExit) as left:
        main(["compare", str(tmp_path / "a.toml"), str(tmp_path / "b.toml"), "--out", str(out), *words])
    printed = capsys.readouterr()
    assert left.value.code == 2 and printed.out == "" and not out.exists()
    assert printed.err.startswith("error: ")
    assert re.search(message, printed.err), printed.err


def test_the_curves_are_drawn_whatever_the_numbers_are(tmp_path: Path) -> None:
    for name, ours, theirs in [
        ("same", records([8.0, 7.0]), records([8.0, 7.0])),
        ("one", records([8.0]), records([8.1])),
        ("not finite", records([8.0, None, None]), records([8.0, None, 7.0])),
    ]:
        draw(compared(ours, theirs), tmp_path / f"{name}.png")
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG"), name
