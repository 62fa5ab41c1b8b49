"""What the planner predicts of published runs, and what its search reaches on published networks."""

import itertools
import json
import random
import statistics
from pathlib import Path

import numpy as np
import pytest

from titan_planner.places.placement import (
    FixedPipeline,
    Network,
    Placement,
    bottleneck,
    read_networks,
    shortest_path,
)
from titan_planner.places.ravnest import MOST_CLUSTERS, Provider, form_clusters, ravnest_cost, read_providers
from titan_planner.plan.cost import Rates
from titan_planner.published.fit import fit
from titan_planner.published.rows import Row, read_rows
from torchtitan.__main__ import main

pytestmark = pytest.mark.slow

PLANNING = Path(__file__).resolve().parents[1] / "assets" / "planning"
MEGATRON = read_rows(PLANNING / "megatron_selene.toml")
TORCHTITAN = {row.name: row for row in read_rows(PLANNING / "torchtitan_tables.toml")}
H100 = [TORCHTITAN[str(i)] for i in range(9, 42) if i not in (34, 35, 40, 41)]  # slowed by a known defect
A100 = [TORCHTITAN[str(i)] for i in range(1, 9)]
JOB, NETWORKS = read_networks(PLANNING / "dtfm_networks.toml")


def mean_error(rows: list[Row], rates: Rates) -> float:
    return statistics.mean(abs(row.error(rates)) for row in rows)


@pytest.mark.parametrize("most", [2, 3])
def test_megatron_from_175b_to_1t_is_predicted_from_two_rows_of_22b(most: int) -> None:
    rates, names = fit(MEGATRON[:2], most)
    assert len(names) == most
    assert mean_error(MEGATRON[2:], rates) == pytest.approx(0.012, abs=0.0005)
    largest = {2: 0.021, 3: 0.023}[most]
    assert max(abs(row.error(rates)) for row in MEGATRON[2:]) == pytest.approx(largest, abs=0.0005)


@pytest.mark.parametrize(
    ("draws", "median", "most_wrong"), [(11, 0.069, 0.032), pytest.param(40, 0.068, 0.02, marks=pytest.mark.all)]
)
def test_torchtitan_on_h100_is_predicted_from_nine_rows(draws: int, median: float, most_wrong: float) -> None:
    """Any nine; also which of two like runs is the faster, and what interleaving gains at 405B."""
    draw, errors, wrong = random.Random(0), [], 0
    for _ in range(draws):
        known = draw.sample(H100, 9)
        rates, _ = fit(known, 7)
        errors.append(mean_error([row for row in H100 if row not in known], rates))
        seconds = {row.name: float(row.predict(rates).total) for row in H100}
        assert seconds["24"] / seconds["25"] == pytest.approx(1.28, rel=0.03)
        pairs = [(a, b) for a, b in itertools.combinations(H100, 2) if a.group == b.group]
        wrong += sum((a.seconds < b.seconds) != (seconds[a.name] < seconds[b.name]) for a, b in pairs)
    assert statistics.median(errors) == pytest.approx(median, abs=0.0005)
    assert wrong <= most_wrong * len(errors) * len(pairs)
    rates, _ = fit(H100, 7)
    assert all((a.seconds < b.seconds) == (a.predict(rates).total < b.predict(rates).total) for a, b in pairs)


def test_torchtitan_on_a100_is_predicted_from_two_rows() -> None:
    errors = []
    for known in itertools.combinations(A100, 2):
        rates, _ = fit(known, 2)
        errors.append(mean_error([row for row in A100 if row not in known], rates))
    assert statistics.median(errors) == pytest.approx(0.028, abs=0.0005)


def test_the_parts_of_a_step_add_up_and_the_command_shows_them(capsys: pytest.CaptureFixture[str]) -> None:
    file = str(PLANNING / "megatron_selene.toml")
    main(["plan", "rows", file, "--fit", "22B full,22B selective", "--explain"])
    lines = capsys.readouterr().out.splitlines()
    begin = next(i for i, line in enumerate(lines) if "530B full" in line)
    whole, parts = float(lines[begin].split()[3]), [float(line.split()[0]) for line in lines[begin + 1 : begin + 7]]
    assert sum(parts) == pytest.approx(whole, abs=0.004)
    assert "22B full" in lines[4] and lines[4].endswith("fitted on")
    with pytest.raises(SystemExit, match="has no row 23B; use some of 22B full, "):
        main(["plan", "rows", file, "--fit", "23B"])


@pytest.mark.parametrize("case", range(5))
def test_the_cost_of_a_placement_is_dtfms(case: int) -> None:
    name, network, said = NETWORKS[case]
    placement = Placement(network, JOB)
    found = placement.search(restarts=0)
    best = 31.634160 if case == 1 else said["best_known"]  # four stages of one device of each machine, four of singles
    assert found.cost == pytest.approx(best, abs=1e-6), name
    assert placement.cost(np.array(found.stages)) == found.cost
    assert sorted(itertools.chain(*found.stages)) == list(range(64))
    chance = np.random.default_rng(0)
    drawn = statistics.mean(placement.cost(placement.random(chance)) for _ in range(60))
    assert drawn == pytest.approx(said["random_groups_mean"], rel=0.04)


@pytest.mark.parametrize("case", [pytest.param(0, marks=pytest.mark.all), 4])
def test_the_search_needs_no_regions_and_repeats_itself(case: int) -> None:
    name, network, said = NETWORKS[case]
    placement = Placement(network, JOB)
    assert placement.search(seed=3, restarts=3, from_regions=False).cost <= 1.01 * said["best_known"], name
    ends = [placement.search(seed=3, restarts=1, steps=300, from_regions=False) for _ in range(2)]
    assert ends[0] == ends[1]


def test_a_small_network_with_unlike_directions_is_placed_as_well_as_by_trying_all(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    file, delay, gbit = tmp_path / "net.toml", draw.uniform(1, 90, (6, 6)), draw.uniform(0.3, 9, (6, 6))
    file.write_text(
        "[job]\nstages = 3\ndevices_per_stage = 2\nc_dp = 0.5\nc_pp = 0.3\n[[case]]\n"
        f"delay_ms = {delay.tolist()}\ngbit = {gbit.tolist()}\n"
    )
    job, [(_, network, _)] = read_networks(file)
    placement = Placement(network, job)
    best = min(placement.cost(np.array(order).reshape(3, 2)) for order in itertools.permutations(range(6)))
    assert placement.search().cost == best
    there = network.delay + 8 * 0.5 / 2 / network.bandwidth
    exchange = max(there[a, b] + there[b, a] for a, b in placement.search().stages)
    assert exchange <= best


def test_pairings_and_paths_are_the_best_of_all() -> None:
    draw = np.random.default_rng(1)
    for _ in range(50):
        seconds = draw.integers(0, 9, (4, 4)).astype(float)
        ways = itertools.permutations(range(4))
        assert bottleneck(seconds) == min(max(seconds[i, j] for i, j in enumerate(way)) for way in ways)
        edges = seconds + seconds.T
        paths = [sum(edges[a, b] for a, b in itertools.pairwise(way)) for way in itertools.permutations(range(4))]
        length, order = shortest_path(edges)
        assert length == min(paths) == sum(edges[a, b] for a, b in itertools.pairwise(order))


def test_a_network_that_does_not_fit_the_job_is_refused(tmp_path: Path) -> None:
    line = Network(np.zeros((3, 3)), np.ones((3, 3)), ("a", "b", "c"))
    with pytest.raises(ValueError, match="2 stages of 2 devices need 4, but the network has 3"):
        Placement(line, FixedPipeline(2, 2, 1.0, 1.0))
    (tmp_path / "net.toml").write_text("[job]\nstages = 3\n")
    with pytest.raises(ValueError, match="has no 'devices_per_stage'"):
        read_networks(tmp_path / "net.toml")


def test_as_many_clusters_as_hold_the_model_are_formed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = PLANNING / "ravnest_clusters.json"
    providers = read_providers(file)
    assert ravnest_cost([providers], 30 * 1024) == 0  # so Ravnest's own cost never asks for a second
    clusters = form_clusters(providers, 30 * 1024)
    assert len(clusters) == 5 and all(sum(p.megabytes for p in cluster) >= 30 * 1024 for cluster in clusters)
    assert sorted(p.name for cluster in clusters for p in cluster) == sorted(p.name for p in providers)
    main(["plan", "place", str(file), "--model_gb", "100"])
    assert capsys.readouterr().out.startswith("1 clusters")
    with pytest.raises(ValueError, match=r"have 170.0 GB, but the model needs 200.0"):
        form_clusters(providers, 200 * 1024)
    (tmp_path / "nodes.json").write_text(json.dumps({"0": {"benchmarks": {}}}))
    with pytest.raises(ValueError, match="is not a node_configs.json of Ravnest: KeyError: 'ram'"):
        read_providers(tmp_path / "nodes.json")


def test_no_more_clusters_would_hold_the_model() -> None:
    draw = random.Random(2)
    for _ in range(20):
        providers = [Provider(str(i), 1024 * draw.randint(4, 32), draw.choice([10, 50, 100])) for i in range(6)]
        model = draw.uniform(0.2, 0.6) * sum(p.megabytes for p in providers)
        found = len(form_clusters(providers, model))
        for way in itertools.product(range(found + 1), repeat=6):
            sums = [
                sum(p.megabytes for p, own in zip(providers, way, strict=True) if own == n) for n in range(found + 1)
            ]
            assert found == MOST_CLUSTERS or min(sums) < model
