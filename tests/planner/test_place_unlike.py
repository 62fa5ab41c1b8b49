"""Pipelines on unlike nodes and links: our objective and its search, against plain counting and against trying all."""

import dataclasses
import itertools
import json
import re
import time
import xml.etree.ElementTree
from pathlib import Path

import numpy as np
import pytest
import tomli

from benchmarks.planner.irregular_networks import draw_load, draw_network
from titan_planner.places import pipelines as unlike
from titan_planner.places.network import Network, is_unlike, read_cluster_network, to_network
from titan_planner.places.pipelines import Load, Pipelines
from titan_planner.places.placement import FixedPipeline
from titan_planner.places.ravnest import Provider, ravnest_cost, rewarded_cost
from titan_planner.places.swarm import loss_of_meeting
from titan_planner.places.unlike import traffic
from titan_planner.places.verb import load_of
from titan_planner.plan.like import job_of
from titan_planner.plan.pipeline.actions import list_actions
from titan_planner.plan.pipeline.timeline import simulate
from torchtitan.__main__ import main
from torchtitan.config.load import check
from torchtitan.models.families import load_run_or_exit

ROOT = Path(__file__).resolve().parents[2]
CONFIG = str(ROOT / "train_configs" / "llama3_2_1b.toml")
PLANNING = ROOT / "tests" / "assets" / "planning"
SITES = """name = "two sites"
groups = [
  {region = "Ohio", devices = 4, inside = [0.1, 100], kind = "A100", memory_gib = 40},
  {region = "Bonn", devices = 2, inside = [0.1, 25], tflops = 125, memory_gib = 24, memory_gbytes_per_second = 600},
]
pairs = {"Ohio-Bonn" = [90, 1.0]}
"""


def small(seed: int, nodes: int = 5, stages: int = 2, replicas: int = 2, layers: int = 5) -> Pipelines:
    network = draw_network(nodes, seed)
    return Pipelines(network, dataclasses.replace(draw_load(network, stages, replicas), layers=layers))


def counted(problem: Pipelines, nodes: list[list[int]], layers: list[int]) -> float:
    """The objective once more, link by link."""
    net, load = problem.network, problem.load

    def send(a: int, b: int, gb: float) -> float:
        return net.delay[a, b] + 8 * gb / net.bandwidth[a, b]

    stages, last = range(load.stages), load.stages - 1
    if any(layers[s] > load.most[n, s] for s in stages for n in nodes[s]):
        return np.inf
    each = [
        max(load.layer[n] for n in nodes[s]) * layers[s] + (s == last) * max(load.last[n] for n in nodes[s])
        for s in stages
    ]
    links = [list(zip(nodes[s], nodes[s + 1], strict=True)) for s in range(last)]
    hops = [max(send(a, b, load.sent) + send(b, a, load.sent) for a, b in pairs) for pairs in links]
    busy = [8 * load.sent / min(net.bandwidth[a, b], net.bandwidth[b, a]) for pairs in links for a, b in pairs]
    rounds = [sum(each[s:]) + sum(hops[s:]) for s in stages]
    period = max([*each, *busy, *(rounds[s] / min(load.microbatches, load.stages - s) for s in stages)])
    exchange = []
    for s in stages:
        size = load.exchanged / 2 * (layers[s] + (s == 0) * load.ends[0] + (s == last) * load.ends[1]) / load.replicas
        ring = [(nodes[s][r], nodes[s][(r + 1) % load.replicas]) for r in range(load.replicas)]
        delay = max(net.delay[a, b] + net.delay[b, a] for a, b in ring)
        rate = max(1 / net.bandwidth[a, b] + 1 / net.bandwidth[b, a] for a, b in ring)
        exchange.append((load.replicas - 1) * (delay + 8 * size * rate))
    total = load.passes * (sum(each) + sum(hops) + (load.microbatches - 1) * period)
    return total + load.passes * max(exchange) * (1 - load.overlap) / load.every + load.update


def every_plan(problem: Pipelines) -> float:
    load = problem.load
    cuts = [c for c in itertools.product(range(1, load.layers + 1), repeat=load.stages) if sum(c) == load.layers]
    return min(
        counted(problem, np.array(order).reshape(load.stages, load.replicas).tolist(), list(cut))
        for order in itertools.permutations(range(problem.count), problem.used)
        for cut in cuts
    )


@pytest.mark.parametrize(
    ("seed", "shape"), [(0, (5, 2, 2, 5)), (1, (5, 2, 2, 5)), (2, (5, 5, 1, 7)), (3, (6, 3, 2, 4))]
)
def test_the_best_of_a_small_network_is_that_of_all_plans(
    seed: int, shape: tuple[int, int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = small(seed, *shape)
    problem = Pipelines(problem.network, dataclasses.replace(problem.load, ends=(0.4, 0.3), overlap=0.2))
    best = every_plan(problem)
    assert problem.search().seconds == pytest.approx(best, rel=1e-12)
    monkeypatch.setattr(unlike, "_EXHAUSTIVE", 0)
    found = problem.search(steps=300)
    assert found.fits and found.seconds == pytest.approx(best, rel=1e-12)
    assert counted(problem, found.nodes, found.layers) == pytest.approx(found.seconds, rel=1e-12)


def test_the_layers_of_fixed_stages_are_cut_as_well_as_by_trying_all() -> None:
    for seed in range(20):
        problem = small(seed, 8, 4, 2, 11)
        order = np.random.default_rng(seed).permutation(8)
        cuts = [c for c in itertools.product(range(1, 9), repeat=4) if sum(c) == 11]
        best = min(counted(problem, order.reshape(4, 2).tolist(), list(cut)) for cut in cuts)
        if best < np.inf:
            plan = problem.plan(order, problem.split(order))
            assert plan.fits and plan.seconds == pytest.approx(best, rel=1e-12), seed


def test_no_memory_is_exceeded_and_fast_nodes_get_more_layers() -> None:
    for seed in range(3):
        network = draw_network(16, seed)
        problem = Pipelines(network, draw_load(network, 4, 4))
        plan = problem.search(steps=50)
        assert plan.fits and sum(plan.layers) == problem.load.layers
        assert all(n <= problem.load.most[d, s] for s, n in enumerate(plan.layers) for d in plan.nodes[s])
    line = Network(np.zeros((3, 3)), np.where(np.eye(3), np.inf, 100.0), ("a", "b", "c"), ("a", "b", "c"))
    load = Load(3, 1, 12, np.array([1.0, 2.0, 4.0]), np.zeros(3), np.full((3, 3), 12), 1e-6, 0.0, microbatches=90)
    plan = Pipelines(line, load).search()
    assert {nodes[0]: layers for nodes, layers in zip(plan.nodes, plan.layers, strict=True)} == {0: 8, 1: 3, 2: 1}
    tight = dataclasses.replace(load, most=np.array([[4] * 3, [6] * 3, [2] * 3]))
    assert Pipelines(line, tight).search().layers.count(6) == 1
    assert not Pipelines(line, dataclasses.replace(load, most=np.full((3, 3), 3))).search(steps=50).fits


def test_steady_state_and_fill_are_those_of_torchs_own_list() -> None:
    """Where a hop takes long, one stage's microbatches are all on their way, and the closed form knows it."""
    for hop in (0.0, 0.7, 5.0):
        nodes = 4
        delay = np.where(np.eye(nodes), 0.0, hop)
        network = Network(delay, np.full((nodes, nodes), np.inf), tuple("abcd"), tuple("abcd"))
        load = Load(nodes, 1, nodes, np.full(nodes, 3.0), np.zeros(nodes), np.full((nodes, nodes), 9), 0.0, 0.0,
                    microbatches=40)  # fmt: skip
        plan = Pipelines(network, load).search()
        orders = list_actions("1F1B", nodes, 1, 40)
        seconds = {(s, kind): t for s in range(nodes) for kind, t in (("F", 1.0), ("B", 2.0))}
        assert plan.seconds == pytest.approx(simulate(orders, seconds, hop).seconds, rel=0.04), hop


def test_both_directions_count_and_rare_exchanges_cost_less() -> None:
    network = draw_network(6, 1)
    job = FixedPipeline(3, 2, 2.0, 0.5, layers=6, microbatches=4)
    load = load_of(job, network)
    before = Pipelines(network, load).search()
    slow = dataclasses.replace(network, delay=network.delay.copy(), bandwidth=network.bandwidth.copy())
    a, b = before.nodes[0][0], before.nodes[1][0]
    slow.delay[b, a] += 50  # only the way back
    again = Pipelines(slow, load).plan(np.array(before.nodes).ravel(), np.array(before.layers))
    assert again.seconds > before.seconds + 50
    rare = load_of(dataclasses.replace(job, exchange_every=10, overlap=0.5), network)
    same = Pipelines(network, rare).plan(np.array(before.nodes).ravel(), np.array(before.layers))
    assert same.parts["exchange"] == pytest.approx(before.parts["exchange"] / 20)
    assert Pipelines(network, rare).search().seconds <= same.seconds


def test_the_same_seed_gives_the_same_plan() -> None:
    network = draw_network(16, 5)
    problem = Pipelines(network, draw_load(network, 4, 4))
    assert problem.search(7, steps=200) == problem.search(7, steps=200)


def test_a_thousand_sites_are_placed() -> None:
    began, network = time.process_time(), draw_network(1000, 0)
    problem = Pipelines(network, draw_load(network, 20, 50))
    drawn = np.random.default_rng(0).permutation(1000)
    plan = problem.search(steps=0)
    assert plan.fits and plan.seconds < 0.8 * problem.plan(drawn, problem.split(drawn)).seconds
    assert time.process_time() - began < 30


def test_what_travels_between_regions_is_what_pipelines_and_rings_send() -> None:
    network = to_network({
        "groups": [{"region": "A", "devices": 2, "inside": [0, 10]}, {"region": "B", "devices": 2, "inside": [0, 10]}],
        "outside": [5, 1],
    })  # fmt: skip
    load = load_of(FixedPipeline(2, 2, 3.0, 0.5), network)
    along = Pipelines(network, load).plan(np.array([0, 2, 1, 3]), np.array([1, 1]))  # pipelines stay in a region
    hops, between = traffic(network, load, along)
    assert hops.tolist() == [2.0] and between == {("A", "B"): 2 * 2 * 3.0}
    across = Pipelines(network, load).plan(np.array([0, 1, 2, 3]), np.array([1, 1]))  # rings do
    assert traffic(network, load, across)[1] == {("A", "B"): 2.0}


def test_a_plan_on_unlike_nodes_passes_check_and_names_its_nodes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster, out, drawing = tmp_path / "sites.toml", tmp_path / "plan.toml", tmp_path / "map.svg"
    cluster.write_text(SITES)
    assert is_unlike(cluster) and not is_unlike(ROOT / "clusters" / "h100_1x8.toml")
    options = ["--training.global_batch_size", "32", "--training.local_batch_size", "16"]
    degrees = ["--parallelism.pipeline_parallel_degree", "3", "--parallelism.data_parallel_shard_degree", "2"]
    fixed = [*degrees, *options]
    written = ["--explain", "--out", str(out), "--drawing", str(drawing)]
    main(["plan", CONFIG, "--cluster", str(cluster), *written, "--", *fixed])
    said = capsys.readouterr().out
    assert "   1 pp 3 x dp_shard 2, 16 microbatches of 1, layers " in said and "GB on" in said
    best = next(line for line in said.splitlines() if line.startswith("   1 pp 3")).split()
    rows = [line.split() for line in said.split("slowest node\n")[1].splitlines()[:3]]
    assert sum(float(row[2]) + float(row[3]) for row in rows) == pytest.approx(float(best[-4]), abs=0.005)  # fill
    assert max(float(row[4]) for row in rows) == pytest.approx(float(best[-2]), abs=0.002)  # exchange
    assert max(float(row[5]) for row in rows) == float(best[-5]) and all(float(row[5]) < float(row[6]) for row in rows)
    nodes = out.with_suffix(".nodes").read_text().split()
    assert sorted(nodes) == ["Bonn-0", "Bonn-1", "Ohio-0", "Ohio-1", "Ohio-2", "Ohio-3"]
    assert [name for name in nodes if name.startswith("Bonn")] in (nodes[:2], nodes[2:4], nodes[4:])  # one stage
    check(tomli.loads(out.read_text()), str(out), 6)
    assert json.loads(out.with_suffix(".json").read_text())["nodes"] == nodes
    text = [found.text for found in xml.etree.ElementTree.parse(drawing).iter() if found.text]
    assert "Ohio" in text and any("stage 2: " in one for one in text)


@pytest.mark.parametrize("words", [["--verify", "0"], ["--verify", "2"], ["--schedules"]])
def test_what_is_only_for_like_nodes_is_refused_on_unlike_ones(tmp_path: Path, words: list[str]) -> None:
    (tmp_path / "sites.toml").write_text(SITES)
    with pytest.raises(SystemExit, match=f"{words[0]} is for like nodes, but .* has unlike ones; leave it out"):
        main(["plan", CONFIG, "--cluster", str(tmp_path / "sites.toml"), *words])


def test_what_unlike_nodes_cannot_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "sites.toml"

    def refused(text: str, match: str, *options: str) -> None:
        file.write_text(text)
        with pytest.raises(SystemExit, match=match):
            main(["plan", CONFIG, "--cluster", str(file), "--", "--training.global_batch_size", "32", *options])

    refused(SITES.replace('kind = "A100"', 'kind = "abacus"'), "node Ohio-0 has no tflops, and abacus is no kind")
    refused(SITES.replace(", memory_gib = 40", ""), "node Ohio-0 has no memory_gib; give its group memory_gib")
    refused(SITES.replace("memory_gib = 40", "memory_gib = 2").replace("memory_gib = 24", "memory_gib = 2"), "none of")
    refused(
        SITES,
        "context_parallel_degree = 2 is not searched on unlike nodes",
        "--parallelism.context_parallel_degree",
        "2",
    )
    refused(SITES.replace("devices = 4", "devices = 4, per_node = 2"), "nodes of 1, 2 devices; the launcher")
    refused(SITES.replace("devices = 4", "devices = 4, per_node = 3"), "no multiple of its per_node")
    refused(SITES.replace("[90, 1.0]", "[90, 0]"), "a bandwidth of 0 or less")
    refused(SITES.replace("pairs", "others"), "says nothing of Ohio and Bonn")
    refused("delay_ms = [[0, 1], [1, 0]]\ngbit = [[1, 1]]\n", r"delay_ms is \(2, 2\) and gbit \(1, 2\)")
    matrices = "delay_ms = [[0, 1], [1, 0]]\ngbit = [[0, 1], [2, 0]]\n"
    refused(matrices + "tflops = [1]\n", "tflops has 1 values for 2 nodes")
    refused(matrices + 'names = ["a", "a"]\n', "2 nodes have 1 names and 2 regions")
    refused("[[case]]\ngroups = []\n[[case]]\ngroups = []\n", "has 2 cases; a cluster is one")
    refused('groups = [{region = "A", inside = [0, 1]}]\n', "has no 'devices'")
    network = draw_network(4, 0)
    with pytest.raises(ValueError, match="3 stages of 2 nodes need 6, but the network has 4"):
        draw_load(network, 3, 2)
    with pytest.raises(ValueError, match="2 layers cannot fill 4 stages"):
        dataclasses.replace(draw_load(network, 4, 1), layers=2)


def test_ravnests_nodes_are_a_cluster_and_more_clusters_are_rewarded(capsys: pytest.CaptureFixture[str]) -> None:
    file = PLANNING / "ravnest_clusters.json"
    _, network, _ = read_cluster_network(file)
    assert is_unlike(file) and len(network.regions) == 12 and network.bandwidth[0, 11] == network.bandwidth[11, 0]
    main(["plan", "place", str(file), "--model_gb", "30"])
    assert "clusters  Ravnest's cost" in capsys.readouterr().out
    half = [Provider("a", 1000, 10), Provider("b", 1000, 10)]
    assert ravnest_cost([half], 900) == ravnest_cost([[half[0]], [half[1]]], 900) == 0
    assert rewarded_cost([[half[0]], [half[1]]], 900) == rewarded_cost([half], 900) / 4


def test_place_shows_our_objective_beside_dtfms(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "net.toml"
    case = '[[case]]\nname = "pair"\n' + SITES.partition("\n")[2]
    job = "[job]\nstages = 3\ndevices_per_stage = 2\nc_dp = 0.5\nc_pp = 0.3\n"
    file.write_text(f"{job}layers = 6\nlayer_tflop = 20\nlayer_gib = 5\nmicrobatches = 8\n{case}")
    main(["plan", "place", str(file), "--steps", "100", "--drawing", str(tmp_path / "map.svg")])
    said = capsys.readouterr().out
    assert "pair: " in said and "pair, by our objective: " in said and "DT-FM's placement" in said
    main(["plan", "place", str(file), "--steps", "100", "--objective", "ours"])
    assert "pair, by our objective" in capsys.readouterr().out
    main(["plan", "place", str(file), "--objective", "ravnest", "--model_gb", "50"])
    assert "3 clusters" in capsys.readouterr().out
    file.write_text(file.read_text().replace("layer_gib = 5", "layer_gib = 30"))
    with pytest.raises(SystemExit, match="no placement was found whose layers fit the memory"):
        main(["plan", "place", str(file), "--steps", "20", "--objective", "ours"])
    file.write_text(file.read_text().replace("memory_gib = 24, ", ""))
    with pytest.raises(SystemExit, match="Ravnest's objective needs memory_gib"):
        main(["plan", "place", str(file), "--objective", "ravnest", "--model_gb", "50"])


def test_regions_are_planned_as_sites_with_what_their_lines_cost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slow = SITES.replace('"Ohio-Bonn" = [90, 1.0]', '"Ohio-Bonn" = [90, 0.0001]')
    (tmp_path / "sites.toml").write_text(slow)
    words = ["plan", str(ROOT / "train_configs/debug_model.toml"), "--cluster", str(tmp_path / "sites.toml")]
    main([*words, "--swarm", "Ohio", "--", "--training.global_batch_size", "8", "--swarm.codec", "bfloat16"])
    said = capsys.readouterr().out
    config, blueprint = load_run_or_exit(["--job.config_file", words[1]], None, 0, prog="plan")
    parameters = job_of(config, blueprint, 2, ["--training.global_batch_size", "8"]).blueprint.num_parameters
    line = next(line for line in said.splitlines() if line.startswith("  Bonn"))
    seconds = float(re.search(r"bfloat16 ([\d.]+)", line)[1])  # type: ignore[index]
    assert seconds == pytest.approx(2 * 16 * parameters / 1e5 + 4 * 0.18, rel=0.01)  # there and back, 4 fragments
    assert "swarm.every = 100 is too few for bfloat16" in said and "Bonn's line alone asks for every >=" in said
    assert "loss: more than +2.0% beside one run with the same tokens" in said and "meetings planned: 1" in said
    assert [loss_of_meeting(size)[1] for size in (8_000_000, 35_000_000, 1_300_000_000, 10**10)] == pytest.approx(
        [0.02, 0.02, 0.005, 0.003]
    )  # as published
    for cluster, region, says in (
        (tmp_path / "sites.toml", "Rome", "--swarm Rome is no region of the file; use one of Ohio, Bonn"),
        (ROOT / "clusters/cpu_1x2.toml", "here", "--swarm here needs a file of regions"),
    ):
        with pytest.raises(SystemExit, match=says):
            main([*words[:3], str(cluster), "--swarm", region, "--", "--training.global_batch_size", "8"])
