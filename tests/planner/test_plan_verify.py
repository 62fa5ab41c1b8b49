"""Predicted beside measured: at a run's end and by `plan --verify`, without a run where none is needed."""

import argparse
import itertools
import json
import math
import random
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.tiny_runs import tiny_config, train_here
from titan_planner.plan import verify as plan_verify
from titan_planner.plan.verify import Trial, judge, kendall, measure, regret, shown
from torchtitan.__main__ import main
from torchtitan.models.families import load_run
from torchtitan.observe.planned import FILE, compare, described, differences, read_plan, read_steps
from torchtitan.refusal import Refusal

ROOT = Path(__file__).resolve().parents[2]
CPU, DEBUG = str(ROOT / "clusters/cpu_1x2.toml"), str(ROOT / "train_configs/debug_model.toml")


def test_kendalls_tau_counts_pairs_in_the_right_order() -> None:
    up = [(float(i), float(i**2)) for i in range(6)]
    assert kendall(up) == 1.0
    assert kendall([(x, -y) for x, y in up]) == -1.0
    assert kendall([(1, 1), (2, 3), (3, 2), (4, 4)]) == pytest.approx(4 / 6)  # one of six pairs is wrong
    assert kendall([(1, 1), (1, 2), (2, 3)]) == pytest.approx(2 / math.sqrt(2 * 3))  # a tie in what is predicted
    assert kendall([(1, 1), (1, 2)]) == 0.0  # the plan predicted the same for both


def test_kendalls_tau_equals_that_of_all_orders_counted_one_by_one() -> None:
    chance = random.Random(0)
    for _ in range(20):
        pairs = [(chance.random(), chance.random()) for _ in range(9)]
        order = [y for _, y in sorted(pairs)]
        swapped = sum(a > b for a, b in itertools.combinations(order, 2))
        assert kendall(pairs) == pytest.approx(1 - 2 * swapped / 36)


def test_regret_is_the_chosens_time_over_the_best_measured() -> None:
    assert regret([(1.0, 1.0), (2.0, 2.0)]) == 0.0
    assert regret([(2.0, 1.0), (1.0, 1.3), (3.0, 1.2)]) == pytest.approx(0.3)


def trial(number: int, predicted: float, *seconds: float, failed: str = "") -> Trial:
    return Trial(f"layout {number}", predicted, Path(f"{number}.toml"), number == 0, [*seconds], failed=failed)


def test_a_layout_that_failed_is_counted_and_shown_with_its_reason() -> None:
    trials = [trial(0, 1.0, 1.0, 1.2), trial(1, 2.0, 1.0, 1.0), trial(2, 3.0, failed="run 2 ended\n  out of memory")]
    verdict = judge(trials)
    assert verdict["failed"] == 1 and verdict["kendall_tau"] == -1.0
    assert verdict["regret"] == pytest.approx(0.1) and verdict["spread_of_repeats"] == pytest.approx(0.2 / 1.1)
    text = shown(trials, verdict)
    assert "failed: run 2 ended" in text and "out of memory" in text and "1 failed" in text
    trials[0].failed = "it broke"
    assert judge(trials)["regret"] is None and "the chosen failed" in shown(trials, judge(trials))


def test_runs_that_no_time_is_left_for_are_failed() -> None:
    trials = [trial(0, 1.0), trial(1, 2.0)]
    args = argparse.Namespace(minutes=0.0, seed=0, repeats=2, steps=5, runs=Path("nowhere"))
    measure(trials, args, 2)
    assert all("--minutes 0 are over" in one.failed for one in trials)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--verify", "0"], "--verify 0: use 1 or more"),
        (["--verify", "1", "--steps", "3"], "--steps 3: use 5 or more"),
        (["--verify", "1", "--cluster", str(ROOT / "clusters/h100_32x8.toml")], "has 256 devices"),
    ],
)
def test_a_verification_that_cannot_be_made_is_refused(options: list[str], reason: str) -> None:
    with pytest.raises(SystemExit, match=reason):
        main(["plan", DEBUG, "--cluster", CPU, *options, "--", "--training.global_batch_size", "256"])


def test_the_layouts_that_are_run_are_the_best_and_some_spread_over_the_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    chosen: list[list[Trial]] = []

    def record(trials: list[Trial], args: argparse.Namespace, ranks: int) -> None:
        chosen.append(trials)
        for one in trials:
            one.seconds.append(2 * one.predicted)

    monkeypatch.setattr(plan_verify, "measure", record)
    command = ["plan", DEBUG, "--cluster", CPU, "--verify", "3", "--others", "4", "--runs", str(tmp_path)]
    for _ in range(2):
        main([*command, "--", "--training.global_batch_size", "16"])
    assert [one.layout for one in chosen[0]] == [one.layout for one in chosen[1]]  # the same seed
    assert [one.is_best for one in chosen[0]] == [True] * 3 + [False] * 4
    others = [one.predicted for one in chosen[0][3:]]
    assert others == sorted(others) and others[-1] > 1.2 * chosen[0][0].predicted
    assert len({one.layout for one in chosen[0]}) == 7
    for one in chosen[0]:
        config, _ = load_run(["--job.config_file", str(one.file)], 2)
        assert not config.checkpoint.enable and config.training.global_batch_size == 16
    kept = json.loads((tmp_path / "verify.json").read_text())
    assert kept["kendall_tau"] == 1.0 and kept["regret"] == 0.0 and len(kept["layouts"]) == 7
    assert "Kendall" in capsys.readouterr().out


def prediction(file: Path, config: Any, **others: Any) -> None:
    parts = {"layers": 0.75, "output layer and loss": 0.2, "optimizer": 0.05}
    said = {"seconds": 1.0, "memory_gib": 1.0, "parts": parts, "rests_on": "a test"}
    file.write_text(json.dumps(said | {"run": described(config.model_dump())} | others))


def test_a_run_from_a_plan_says_at_its_end_what_was_predicted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Also after a resume, about the steps since; and a run of another layout is not compared."""
    caplog.set_level("INFO", logger="torchtitan")
    plan = tmp_path / "plan.json"
    keys = {"checkpoint__enable": True, "job__plan": str(plan), "checkpoint__interval": 5}
    config = tiny_config(tmp_path / "run", training__steps=5, lr_scheduler__total_steps=9, **keys)
    prediction(plan, config)
    records = train_here(config)
    kept = json.loads((tmp_path / "run" / FILE).read_text())
    assert kept["measured"]["step_seconds"]["predicted"] == 1.0
    assert kept["measured"]["update_seconds"]["predicted"] == 0.05
    assert kept["measured"]["forward_backward_seconds"]["predicted"] == pytest.approx(0.95)
    assert kept["measured"]["step_seconds"]["measured"] in [sum(r["step_seconds"] for r in records[3:]) / 2]
    plan.unlink()  # the run folder has it
    records = train_here(tiny_config(tmp_path / "run", training__steps=9, lr_scheduler__total_steps=9, **keys))
    kept = json.loads((tmp_path / "run" / FILE).read_text())
    assert kept["measured"]["step_seconds"]["measured"] == records[-1]["step_seconds"]
    prediction(plan, config)
    train_here(tiny_config(tmp_path / "other", training__steps=4, **keys | {"training__local_batch_size": 4}))
    assert not (tmp_path / "other" / FILE).exists()
    assert "local_batch_size is 4, the plan's 8" in caplog.text


def test_a_step_that_a_log_line_shares_with_the_warm_up_is_left_out(tmp_path: Path) -> None:
    lines = [{"step": step, "step_seconds": float(step)} for step in (1, 10, 20, 30)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert [record["step"] for record in read_steps(tmp_path)] == [20, 30]
    assert [record["step"] for record in read_steps(tmp_path, begun=20)] == [30]
    with pytest.raises(Refusal, match="no measured step after step 30"):
        read_steps(tmp_path, begun=30)
    with pytest.raises(Refusal, match=r"metrics\.jsonl cannot be read"):
        read_steps(tmp_path / "nowhere")


def test_what_is_no_plan_is_refused_and_a_changed_key_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("{}")
    for name in ("a.json", "b.json"):
        with pytest.raises(Refusal, match="cannot be read"):
            read_plan(tmp_path / name)
    assert differences({"a": 1, "b": 2}, {"a": 1, "b": 3}) == ["b is 3, the plan's 2"]
    assert compare({"seconds": 1, "memory_gib": 1, "parts": {}}, [{"step_seconds": 2, "memory_gib": 3}])[0][1:] == (
        1,
        2,
    )


@pytest.mark.parametrize(
    ("file", "cluster", "batch"),
    [
        ("llama3_8b", "h100_1x8", 16),
        ("llama3_70b", "b200_16x8", 128),
        ("qwen3_0.6b", "h100_1x8", 32),
        ("qwen3_8b", "a100_16x8", 128),
    ],
)
def test_plans_of_several_models_and_machines_pass_check(file: str, cluster: str, batch: int, tmp_path: Path) -> None:
    command = ["plan", str(ROOT / f"train_configs/{file}.toml"), "--cluster", str(ROOT / f"clusters/{cluster}.toml")]
    options = ["--training.global_batch_size", str(batch)]
    for number, degree in enumerate(("1", "2")):
        out = tmp_path / f"{number}.toml"
        main([*command, "--out", str(out), "--", *options, "--parallelism.tensor_parallel_degree", degree])
        written, _ = load_run(["--job.config_file", str(out)], 8 if "1x8" in cluster else 128)
        assert written.job.plan == f"{number}.json" and read_plan(tmp_path / written.job.plan)["seconds"] > 0
        assert written.training.global_batch_size == batch


def test_a_drawing_is_an_svg(tmp_path: Path) -> None:
    command = ["plan", str(ROOT / "train_configs/llama3_70b.toml"), "--cluster", str(ROOT / "clusters/h100_32x8.toml")]
    options = ["--", "--parallelism.pipeline_parallel_degree", "4"]
    main([*command, "--show", "1", "--explain", "--drawing", str(tmp_path / "a.svg"), *options])
    assert ElementTree.parse(tmp_path / "a.svg").getroot().tag.endswith("svg")
    with pytest.raises(SystemExit, match=r"a drawing is an \.svg"):
        main([*command, "--show", "1", "--drawing", str(tmp_path / "a.pdf"), *options])
