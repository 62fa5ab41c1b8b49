"""Mixtures of experts in the planner: memory and traffic against the dry run, and experts over slow links."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from titan_planner.plan.choice import changed, to_text
from titan_planner.plan.cluster import Cluster, read_cluster
from titan_planner.plan.cost import Layout
from titan_planner.plan.search import Choice, Job, Table, evaluate, moved, search
from torchtitan.__main__ import main
from torchtitan.config.schema import Config
from torchtitan.models.families import load_run
from torchtitan.models.operations import Exchange, Share
from torchtitan.tools.dry_run.estimate import estimate

ROOT = Path(__file__).resolve().parents[2]
FILE, CLUSTER = ROOT / "train_configs/qwen3_30b_a3b.toml", ROOT / "clusters/h100_1x8.toml"
ONE = {"pp": 1, "stages_per_rank": 1, "tp": 1, "cp": 1, "replicas": 1, "dp": 16, "ep": 4, "microbatch": 1}
ONE |= {"microbatches": 1, "passes": 1, "regathers": 1}
HSDP = {"dp": 4, "tp": 2, "ep": 4, "replicas": 2, "microbatches": 2}
PIPELINE = {"pp": 2, "microbatches": 4, "regathers": 0, "dp": 8, "ep": 8}


def planned(batch: int, *options: str, **fixed: object) -> tuple[Config, Job]:
    config, blueprint = load_run(["--job.config_file", str(FILE), "--validation.no_enable", *options], None)
    given = batch, config.training.seq_len, False, False, False, lambda tp, cp: tp <= 4, fixed
    return config, Job(blueprint, *given)


def table_of(job: Job, cluster: Cluster, choice: Choice) -> Table:
    columns = {name: np.array([value]) for name, value in asdict(choice).items() if name != "recompute"}
    return evaluate(job, cluster, columns, choice.recompute)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "recompute"),
    [({}, "selective op"), ({"ep": 1, "dp": 2, "microbatch": 4}, "selective op"), (HSDP, "none"), (PIPELINE, "full")],
)
def test_memory_and_traffic_are_the_dry_runs(shape: dict[str, Any], recompute: str) -> None:
    choice = Choice(**{**ONE, **shape}, recompute=recompute)
    batch = choice.replicas * choice.dp * choice.microbatches * choice.microbatch
    config, job = planned(batch, "--model.n_layers", "6", "--training.global_batch_size", str(batch))
    table, world = table_of(job, read_cluster(CLUSTER), choice), choice.pp * choice.replicas * choice.dp * choice.cp
    world *= choice.tp
    _, layout = to_text(changed(config, choice, job, table.counts), world)
    ranks = [0] if choice.pp == 1 else [0, world // 2]
    for held, traffic, rank in zip(table.held, moved(job, table, 0), ranks, strict=True):
        found = estimate(layout, job.blueprint, rank, world)
        assert float(held.peak[0]) == pytest.approx(found.peak_bytes, rel=0.05)
        # Beside counts of each expert's tokens, which are summed over all ranks, the traffic is the same.
        assert traffic == pytest.approx({name: size for name, size in found.moved.items() if size}, abs=8000)


def test_a_token_pays_for_its_own_experts_and_a_rank_for_all_it_has() -> None:
    blueprint = planned(1)[1].blueprint
    few, many = (blueprint.spec.operations(blueprint.shape, Share(1, 4096, ep=ep)).layer for ep in (8, 1))
    assert many.experts == 8 * few.experts == 128 * 3 * 2048 * 768
    products = [each for each in many.operations if type(each).__name__ == "Product"]
    flops = sum(6 * each.rows * each.columns * each.inner * each.count for each in products)
    part = blueprint.parts(4096)[1]
    norms, attention = 2 * 2048 + 2 * 128, 12 * 32 * 128 * 4096
    assert flops == pytest.approx(4096 * (part.flops - 6 * norms - attention))


def test_experts_over_slow_links_cost_what_their_rows_weigh() -> None:
    cluster = read_cluster(CLUSTER)
    slow = replace(cluster.machine, device=replace(cluster.machine.device, per_node=4, between=1e8))
    rows = Exchange("all-to-all", 2**28, axis="ep")
    near, far = (slow.seconds(rows, Layout(dp=16, ep=ep))[0] for ep in (4, 16))
    assert float(near) == pytest.approx(2**28 * 3 / 4 / (450e9 * 0.8), rel=0.05)  # three of four ranks are others
    assert float(far) == pytest.approx(2**28 * 12 / 16 / (1e8 * 0.9), rel=0.01)  # twelve of sixteen are in other nodes
    choice = Choice(**{**ONE, "ep": 16}, recompute="none")
    table = table_of(planned(16)[1], replace(cluster, machine=slow), choice)
    assert table.total[0] > 4 * 48 * slow.all_to_all(2 * 4096 * 8 * 2048, 16)


def test_every_degree_of_experts_is_one_that_divides() -> None:
    _, job = planned(8, recompute="full", microbatch=1)
    tables = search(job, read_cluster(CLUSTER)).tables
    choices = [table.choice(index) for table in tables for index in range(len(table.columns["pp"]))]
    assert len(set(choices)) == len(choices)
    assert {choice.ep for choice in choices} == {1, 2, 4, 8}
    assert all(choice.dp * choice.cp * choice.tp % choice.ep == 0 for choice in choices)


def test_the_plan_of_experts_passes_check(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    out = tmp_path / "plan.toml"
    command = ["plan", str(FILE), "--cluster", str(ROOT / "clusters/h100_32x8.toml"), "--show", "1", "--explain"]
    options = ["--training.global_batch_size", "512", "--parallelism.expert_parallel_degree", "8"]
    main([*command, "--out", str(out), "--", *options, "--parallelism.pipeline_parallel_degree", "1"])
    printed = capsys.readouterr().out
    assert "x ep 8" in printed and "all-to-all of" in printed
    assert load_run(["--job.config_file", str(out)], 256)[0].parallelism.expert_parallel_degree == 8
