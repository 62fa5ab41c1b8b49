"""`plan CONFIG --cluster FILE`: the search against brute force, and its TOML against check."""

import itertools
import json
import re
import xml.etree.ElementTree
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from titan_planner.plan.cluster import read_cluster
from titan_planner.plan.pipeline.schedules import compare
from titan_planner.plan.search import FILLED, RECOMPUTES, Choice, Job, evaluate, moved, search
from torchtitan.__main__ import main
from torchtitan.config.load import to_toml
from torchtitan.models.families import load_run

ROOT = Path(__file__).resolve().parents[2]
CLUSTERS = ROOT / "clusters"


def job(file: str, batch: int, **fixed: object) -> Job:
    config, blueprint = load_run(["--job.config_file", str(ROOT / "train_configs" / file)], None)
    return Job(blueprint, batch, config.training.seq_len, False, False, False, lambda tp, cp: tp <= 8, fixed)


@pytest.mark.parametrize("path", sorted(CLUSTERS.glob("*.toml")), ids=lambda path: path.stem)
def test_ready_files_are_read(path: Path) -> None:
    assert read_cluster(path).num_devices >= 1


def every_layout(world: int, batch: int, per_node: int, layers: int) -> Iterator[Choice]:
    """All that the trainer can run, from the rules alone: every number is tried, and a layout kept if all divide."""
    numbers = range(1, max(world, batch) + 1)
    for tp, cp, pp in itertools.product([n for n in numbers if world % n == 0], repeat=3):
        if tp > min(8, per_node) or pp > layers or world % (tp * cp * pp):
            continue
        for replicas, microbatch, passes in itertools.product(numbers, numbers, numbers):
            ranks = world // (tp * cp * pp)
            if ranks % replicas or batch % (ranks * microbatch * passes):
                continue
            count = batch // (ranks * microbatch * passes)
            if (pp == 1 and passes > 1) or count < pp:
                continue
            rounds = max(1, count // pp)
            many = [n for n in range(2, 9) if pp > 1 and n * pp <= layers and count % rounds == 0]
            for stages, regathers, recompute in itertools.product([1, *many], (0, 1), RECOMPUTES):
                if pp == 1 or regathers == 0:
                    yield Choice(
                        *(pp, stages, tp, cp, replicas, ranks // replicas, microbatch, count, passes, regathers),
                        recompute,
                    )


@pytest.mark.parametrize("file", ["llama3_8b.toml", "llama3_2_1b.toml"])  # the second has one table for both ends
@pytest.mark.parametrize("pp", [1, 2])
def test_a_step_over_a_slow_network_takes_as_long_as_its_bytes(file: str, pp: int) -> None:
    cluster = read_cluster(CLUSTERS / "h100_1x8.toml")
    device = replace(cluster.machine.device, per_node=1, between=1e7)
    cluster = replace(cluster, machine=replace(cluster.machine, device=device), num_devices=2 * pp)
    given = job(file, 2, tp=1, cp=1, replicas=1, pp=pp, microbatch=1, recompute="none", schedule="1F1B")
    for table in search(given, cluster).tables:
        for index in range(len(table.total)):
            sent = [each["all-gather"] + each["reduce-scatter"] for each in moved(given, table, index)]
            least = max(sent) / 2 / (device.between * cluster.machine.rates.between)  # half of each tensor is its own
            assert least <= table.total[index] <= 1.2 * least, table.choice(index)


@pytest.mark.parametrize(
    "given",
    [("h100_1x8", "llama3_8b.toml", 16), ("b200_16x8", "llama3_70b.toml", 8), ("a100_16x8", "llama3_8b.toml", 4)],
)
def test_the_search_finds_what_brute_force_finds(given: tuple[str, str, int]) -> None:
    """Each layout alone, as plain numbers."""
    cluster = replace(read_cluster(CLUSTERS / f"{given[0]}.toml"), num_devices=8 if given[2] > 4 else 16)
    wanted = job(given[1], given[2])
    answer, counts, alone = search(wanted, cluster, 3), {}, []
    for choice in every_layout(cluster.num_devices, given[2], 8, len(wanted.blueprint.layers)):
        columns = {name: np.array([value]) for name, value in asdict(choice).items() if name != "recompute"}
        one = evaluate(wanted, cluster, columns, choice.recompute, counts)
        alone.append((float(one.total[0]), float(one.peak[0]), choice))
    assert len(alone) == answer.num_layouts
    fitting = [entry for entry in alone if entry[1] <= FILLED * cluster.memory_bytes]
    assert len(fitting) == answer.num_fitting
    table, index = answer.tables[answer.best[0][0]], answer.best[0][1]
    best = min(fitting, key=lambda entry: entry[:2])
    assert float(table.total[index]) == pytest.approx(best[0], rel=1e-12)
    same = [choice for total, _, choice in fitting if total == pytest.approx(best[0], rel=1e-12)]
    assert table.choice(index) in same


def test_every_layout_is_one_that_divides_the_ranks_and_the_batch() -> None:
    cluster = read_cluster(CLUSTERS / "h100_1x8.toml")
    seen = set()
    for table in search(job("llama3_8b.toml", 16), cluster).tables:
        for index in range(len(table.columns["pp"])):
            choice = table.choice(index)
            assert choice.pp * choice.replicas * choice.dp * choice.cp * choice.tp == 8
            assert choice.replicas * choice.dp * choice.microbatch * choice.microbatches * choice.passes == 16
            assert choice not in seen
            seen.add(choice)


def test_what_is_fixed_stays_fixed() -> None:
    cluster = read_cluster(CLUSTERS / "h100_1x8.toml")
    fixed = {"tp": 2, "recompute": "full", "schedule": "1F1B", "microbatch": 1}
    answer = search(job("llama3_8b.toml", 16, **fixed), cluster)
    choices = [table.choice(i) for table in answer.tables for i in range(len(table.columns["pp"]))]
    assert choices
    for choice in choices:
        found = asdict(choice) | {"schedule": choice.schedule or "1F1B"}
        assert all(found[name] == value for name, value in fixed.items())


def test_the_verb_lists_explains_and_writes_a_run_that_passes_check(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    out = tmp_path / "plan.toml"
    config, cluster = str(ROOT / "train_configs/llama3_70b.toml"), tmp_path / "half.toml"
    cluster.write_text((CLUSTERS / "h100_32x8.toml").read_text().replace("count = 32", "count = 16"))
    options = ["--explain", "--what_if", "--out", str(out), "--", "--parallelism.context_parallel_degree", "1"]
    main(["plan", config, "--cluster", str(cluster), *options])
    printed = capsys.readouterr().out
    assert " on 32 nodes of 8 H100 (128 devices): 256 sequences" in printed  # whatever the file's name for them says
    assert "needs" in printed and "half the memory" in printed and "activations" in printed
    written, _ = load_run(["--job.config_file", str(out)], 128)
    assert written.parallelism.context_parallel_degree == 1
    assert written.training.global_batch_size == 256


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("device = 3", "is no table"),
        ("[nodes]\ncount = 0\ndevices = 8", "count = 0"),
        ("[nodes]\ncount = 1.5\ndevices = 8", "positive whole number"),
        ("[wheels]\nx = 1", "unknown wheels"),
        ("[rates]\nspeed = 1", "unknown speed"),
        ("[device]\nname = 'x'", "lacks tflops"),
        ("[", "cannot be read as TOML"),
    ],
)
def test_a_wrong_cluster_file_is_refused(text: str, reason: str, tmp_path: Path) -> None:
    whole = (CLUSTERS / "h100_1x8.toml").read_text()
    name = text.partition("]")[0].strip("[") if text.startswith("[") else "device"
    parts = [part for part in whole.split("\n\n") if not part.startswith(f"[{name}]")]
    (tmp_path / "cluster.toml").write_text(
        "\n\n".join([*itertools.takewhile(lambda _: text[0] != "[", [text]), *parts, text * (text[0] == "[")])
    )
    with pytest.raises(SystemExit, match=reason):
        main(["plan", str(ROOT / "train_configs/llama3_8b.toml"), "--cluster", str(tmp_path / "cluster.toml")])


def test_pipelines_are_simulated_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    cluster, wanted = read_cluster(CLUSTERS / "h100_32x8.toml"), job("llama3_70b.toml", 512, pp=4, tp=8)
    answer = search(wanted, cluster, 1)
    table, index = answer.tables[answer.best[0][0]], answer.best[0][1]
    choice = table.choice(index)
    runs = compare(wanted, cluster, choice, table.counts)
    own = next(run for run in runs if (run.schedule, run.stages_per_rank) == (choice.schedule, choice.stages_per_rank))
    assert len(runs) >= 4 and own.timeline.seconds >= runs[0].timeline.seconds
    said = {name: float(np.broadcast_to(part, table.total.shape)[index]) for name, part in table.seconds.parts.items()}
    least = said["layers"] + said["output layer and loss"]
    most = least + said["pipeline filling and draining"] + said["messages between stages"]
    assert 0.99 * least < own.timeline.seconds * choice.passes < 1.02 * most

    drawing, file = tmp_path / "pipeline.svg", str(ROOT / "train_configs/llama3_70b.toml")
    command = ["plan", file, "--cluster", str(CLUSTERS / "h100_32x8.toml"), "--show", "1", "--drawing", str(drawing)]
    main([*command, "--each", str(tmp_path / "each"), "--", "--parallelism.pipeline_parallel_degree", "4"])
    assert sorted(file.name for file in (tmp_path / "each").iterdir()) == ["1.json", "1.svg", "1.toml"]
    assert (
        load_run(["--job.config_file", str(tmp_path / "each/1.toml")], 256)[0].parallelism.pipeline_parallel_degree == 4
    )
    assert (tmp_path / "each/1.svg").read_text() == drawing.read_text() and "as above" in capsys.readouterr().out
    rects = xml.etree.ElementTree.parse(drawing).getroot().findall("{http://www.w3.org/2000/svg}rect")
    assert len(rects) > 100
    with pytest.raises(SystemExit, match="no listed layout has a pipeline"):
        main([*command, "--", "--parallelism.pipeline_parallel_degree", "1"])


def test_a_run_is_compared_with_its_plan(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    plan, run = tmp_path / "plan.json", tmp_path / "run"
    file, cluster = str(ROOT / "train_configs/debug_model.toml"), str(CLUSTERS / "cpu_1x2.toml")
    command = ["--out", str(plan.with_suffix(".toml")), "--", "--training.global_batch_size", "16"]
    command += ["--parallelism.data_parallel_shard_degree", "2"]
    main(["plan", file, "--cluster", cluster, *command])
    said = json.loads(plan.read_text())
    assert sum(said["parts"].values()) == pytest.approx(said["seconds"])
    run.mkdir()
    ran = to_toml(load_run(["--job.config_file", str(plan.with_suffix(".toml"))], 2)[0])
    (run / "config.toml").write_text(ran)
    step = {"forward_backward_seconds": 1.0, "update_seconds": 0.5, "data_seconds": 0.0, "memory_gib": 2.0}
    times = [9.0, 9.0, 9.0, said["seconds"] / 2, said["seconds"] / 2]
    records = [json.dumps({"step": i + 1, "step_seconds": seconds, **step}) for i, seconds in enumerate(times)]
    (run / "metrics.jsonl").write_text("\n".join(records) + "\n")
    main(["plan", "measured", str(run), "--plan", str(plan)])
    assert "+100.0%" in capsys.readouterr().out
    kept = json.loads((run / "plan_measured.json").read_text())
    assert kept["measured"]["memory_gib"]["measured"] == 2.0 and kept["parts"] == said["parts"]

    (run / "config.toml").write_text(ran.replace("data_parallel_shard_degree = 2", "data_parallel_shard_degree = 7"))
    with pytest.raises(SystemExit, match="is not a run of .*data_parallel_shard_degree is 7, the plan.s"):
        main(["plan", "measured", str(run), "--plan", str(plan)])


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--parallelism.pipeline_parallel_first_stage_less_layers", "1"], "cannot be fixed"),
        (["--parallelism.pipeline_parallel_schedule", "GPipe"], "is not searched; use one of 1F1B"),
        (["--parallelism.fsdp_reshard_after_forward", "always"], "is not searched; use one of default"),
        (["--activation_checkpoint.mode", "memory_budget"], "is not searched"),
        (["--activation_checkpoint.selective_ac_option", "2"], "use .op."),
    ],
)
def test_what_is_not_searched_cannot_be_fixed(options: list[str], reason: str) -> None:
    file, cluster = str(ROOT / "train_configs/llama3_8b.toml"), str(CLUSTERS / "a100_16x8.toml")
    options = ["--training.global_batch_size", "128", *options]
    with pytest.raises(SystemExit, match=reason):
        main(["plan", file, "--cluster", cluster, "--", *options])


@pytest.mark.parametrize(("preset", "seconds"), [("gpu-8b", 0.773), ("gpu-1b", 0.434)])
def test_a_probed_gpus_steps_are_predicted_within_six_per_cent(
    preset: str, seconds: float, capsys: pytest.CaptureFixture
) -> None:
    """The measured ones are in docs/recipe/figures.md."""
    main(["plan", str(ROOT / f"benchmarks/recipe/presets/{preset}.toml"), "--cluster", str(CLUSTERS / "h200_1x1.toml")])
    best = re.search(r"^ +1 1 rank, .*none +([\d.]+)", capsys.readouterr().out, re.MULTILINE)
    assert best and float(best[1]) == pytest.approx(seconds, rel=0.06)


def test_what_a_plan_does_not_know_is_said(capsys: pytest.CaptureFixture) -> None:
    file, cluster = str(ROOT / "train_configs/llama3_8b.toml"), str(CLUSTERS / "h100_1x8.toml")
    options = ["--optimizer.name", "Muon", "--training.dtype", "bfloat16", "--training.global_batch_size", "8"]
    main(["plan", file, "--cluster", cluster, "--", *options])
    said = capsys.readouterr().out
    assert "not known: optimizer.name = Muon" in said and "not known: training.dtype = bfloat16" in said
