"""A network between five nodes behind real routers: found out, built, measured, trained across, broken and healed.

The tests are one story, in this order: each needs the network that the one before has left.
"""

import json
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.fleet.reach.world import ADDRESS, CONFIG, NAMES, PYTHON, SSHD, World
from tests.tiny_runs import read_records, train_here
from titan_fleet.ssh.hosts import read_hosts
from titan_fleet.swarm.certificates import make
from titan_planner.places.network import read_cluster_network
from torchtitan.config.load import load_config

pytestmark = pytest.mark.timeout(400)
DIRECT = {("zurich", "lima"), ("zurich", "oslo"), ("zurich", "kyoto"), ("lima", "kyoto")}
PAIRS = [(a, b) for number, a in enumerate(NAMES) for b in NAMES[number + 1 :]]
TINY_RUN = """--training.seq_len 32 --training.global_batch_size 10 --training.steps 2
    --training.mixed_precision_param float32 --lr_scheduler.warmup_steps 1 --metrics.log_freq 1 --debug.seed 0
    --validation.no_enable --metrics.no_enable_tensorboard""".split()


@dataclass
class Network:
    world: World
    folder: Path

    def log(self, node: str) -> str:
        return (self.folder / f"{node}.log").read_text()

    def state(self, node: str) -> dict[str, Any]:
        text = self.world.run(node, "cat", "/run/wireguard/reach0.reach.json", check=False)
        return json.loads(text) if text else {"pairs": {}}

    def ways(self) -> dict[tuple[str, str], str]:
        states = {node: self.state(node)["pairs"] for node in NAMES}
        return {(a, b): states[a].get(b, {}).get("way", "") for a in NAMES for b in NAMES if a != b}

    def join(self, node: str) -> None:
        self.world.join(node, self.folder / "keys", self.folder / f"{node}.log")

    def answers(self, one: str, other: str) -> bool:
        words = ["ping", "-c1", "-W1", ADDRESS[other]]
        return "1 received" in self.world.run(one, *words, check=False)


def wait_until(is_true: Callable[[], Any], why: Callable[[], object] = lambda: "") -> None:
    """As long as it takes, within what a busy machine needs."""
    end = time.monotonic() + 100
    while not is_true():
        assert time.monotonic() < end, why()
        time.sleep(0.2)


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    folder = tmp_path_factory.mktemp("reach")
    make(folder / "keys", ["198.51.100.10"], NAMES)
    world = World()
    try:
        world.serve(folder / "keys", folder / "meet.log")
        network = Network(world, folder)
        wait_until(lambda: "nodes may come" in network.log("meet"), lambda: network.log("meet"))
        for node in NAMES:
            network.join(node)
        yield network
    finally:
        world.stop()


def test_every_pair_that_can_be_direct_is_and_the_rest_is_relayed(network: Network) -> None:
    def is_up() -> bool:
        ways = network.ways()
        return all(ways.values()) and all((ways[pair] == "direct") == (pair in DIRECT) for pair in PAIRS)

    def is_written() -> bool:
        return all("written: " in network.log(node) for node in NAMES)

    wait_until(is_up, network.ways)
    wait_until(is_written, lambda: "\n".join(map(network.log, NAMES)))
    ways = network.ways()
    assert all(way == "carried" for (one, _), way in ways.items() if one == "quito")
    assert all(ways[a, b] == "relayed" for a, b in (("lima", "oslo"), ("oslo", "kyoto"), ("zurich", "quito")))
    assert "both routers" not in network.log("oslo") and "lets in only ports written to" in network.log("oslo")


def test_all_kinds_of_routers_are_named_rightly(network: Network) -> None:
    found = {node: network.state(node)["router"] for node in NAMES}
    kinds = {"zurich": "none", "lima": "keeps", "oslo": "changes", "kyoto": "keeps", "quito": "no UDP"}
    assert {node: router["kind"] for node, router in found.items()} == kinds
    assert {node: router["count"] for node, router in found.items()} == dict(zip(NAMES, (0, 1, 1, 2, 1), strict=True))
    assert "2 routers in a row" in network.log("kyoto") and "no UDP passes" in network.log("quito")


def test_the_files_are_those_that_plan_and_launch_read(network: Network) -> None:
    for node in NAMES:
        name, measured, rests_on = read_cluster_network(network.folder / node / "cluster.toml")
        assert measured.names == NAMES and name == "5 nodes of reach" and "measurement" in rests_on
        assert (measured.delay[0, 1:] > 0).all() and (measured.bandwidth > 0).all()
        hosts = read_hosts(network.folder / node / "nodes.toml")
        assert [(host.name, host.address, host.gpus) for host in hosts] == [(name, ADDRESS[name], 0) for name in NAMES]
    log = network.log("lima")
    assert re.search(r"lima - zurich: direct, [0-9.]+ ms, \d+ Mbit/s there and \d+ back\n", log)
    assert re.search(r"lima - oslo: relayed, .* back; every byte passes the serving machine\n", log)


def test_the_launcher_takes_the_networks_interface_by_itself(network: Network) -> None:
    """The host's name means its address at home, where no other node can write to it."""
    place = ["NNODES=2", "NODE_RANK=1", f"MASTER_ADDR={ADDRESS['zurich']}", "NGPU=1", "PRINT_ONLY=1"]
    said = network.world.run("lima", "env", *place, "./run_llama_train.sh")
    assert "GLOO_SOCKET_IFNAME=reach0 NCCL_SOCKET_IFNAME=reach0" in said, said


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of one process."""
    alone = ["--job.dump_folder", str(tmp_path_factory.mktemp("alone")), "--training.local_batch_size", "10"]
    return losses(train_here(load_config(["--job.config_file", CONFIG, *TINY_RUN, *alone], 1)))


def losses(records: list[dict[str, Any]]) -> list[float]:
    return [record["loss"] for record in records if "loss" in record]


def test_shards_of_a_relayed_pair_train_as_one_process_does(
    network: Network, expected: list[float], tmp_path: Path
) -> None:
    options = [*TINY_RUN, "--job.dump_folder", str(tmp_path), "--training.local_batch_size", "5"]
    ranks = network.world.train(["lima", "oslo"], tmp_path / "log", 29502, options)
    assert [rank.wait(150) for rank in ranks] == [0, 0], [(tmp_path / f"log.{node}").read_text() for node in NAMES[1:3]]
    assert losses(read_records(tmp_path)) == pytest.approx(expected, abs=1e-5) and len(expected) == 2


@pytest.mark.skipif(not Path(SSHD).exists() or not shutil.which("ssh"), reason="openssh-server is not installed")
@pytest.mark.all  # seven starts of torch; test_ssh.py launches on two hosts, the readers take the files above
def test_plan_and_launch_train_a_pipeline_across_it_as_one_process_does(
    network: Network, expected: list[float], tmp_path: Path
) -> None:
    """By the two files that `join` has written, and nothing else; each node has its own disk."""
    recipe, files = [*PYTHON, "-m", "torchtitan"], network.folder / "zurich"
    stages = "--parallelism.pipeline_parallel_degree 5 --checkpoint.no_enable".split()
    plan = ["plan", CONFIG, "--cluster", f"{files}/cluster.toml", "--out", f"{tmp_path}/planned.toml"]
    network.world.run("zurich", *recipe, *plan, "--", *TINY_RUN, *stages)
    launch = ["launch", "ssh", "--hosts", f"{files}/nodes.toml", "--config", f"{tmp_path}/planned.toml"]
    with network.world.open_to_ssh(tmp_path) as ssh:
        said = network.world.run("zurich", *recipe, *launch, "--ssh", ssh, "--name", "planned", timeout=200)
    order = (tmp_path / "planned.nodes").read_text().split()
    assert sorted(order) == sorted(NAMES) and "mesh pp 5" in said and "the prediction rests on reach's" in said
    assert all((tmp_path / f"{node}/runs/planned/node/{rank}").is_dir() for rank, node in enumerate(order))
    assert losses(read_records(tmp_path / order[0] / "runs/planned")) == pytest.approx(expected, abs=1e-5)


def test_how_long_a_router_holds_a_way_open_is_found_out(network: Network) -> None:
    said = "oslo: a way without traffic stays open for 5 s at least, and less than 10 s"
    wait_until(lambda: said in network.log("oslo"), lambda: network.log("oslo"))
    kept = network.world.run("oslo", "wg", "show", "reach0", "persistent-keepalive").split()[1::2]
    assert kept == ["3"] * (len(NAMES) - 1)


def test_a_router_that_is_restarted_and_an_address_that_changes_heal(network: Network) -> None:
    world = network.world
    world.run("home", "nft", "flush", "ruleset")
    world.run("home", "sh", "-c", "ip link set out down; ip link set out up")  # it forgets all that it had noted
    world.run("home", "nft", "-f", "/run/home.nft")
    wait_until(lambda: all(network.answers("lima", node) for node in ("zurich", "oslo")))
    world.run("home", "ip", "address", "delete", "198.51.100.22/24", "dev", "out")
    world.run("home", "ip", "address", "add", "198.51.100.32/24", "dev", "out")
    wait_until(lambda: all(network.answers(node, "lima") for node in NAMES if node != "lima"))

    def has_moved() -> bool:
        """Not by way of the serving machine, which the next test ends."""
        moved = all(f"{node} - lima: direct (198.51.100.32:51820)" in network.log(node) for node in ("zurich", "kyoto"))
        return moved and all(network.ways()[pair] == network.ways()[pair[::-1]] == "direct" for pair in DIRECT)

    wait_until(has_moved, lambda: network.log("kyoto"))


def test_direct_ways_outlive_the_serving_machine_and_another_node_can_pass_on_the_rest(network: Network) -> None:
    world = network.world
    for pid in world.processes("meet"):
        world.run("meet", "kill", "-9", str(pid), check=False)
    answers = [network.answers(node, "lima") for node in ("zurich", "kyoto")]
    world.serve(network.folder / "keys", network.folder / "meet.log", "--through", "zurich")
    assert answers == [True, True]

    def is_through() -> bool:
        ways = network.ways()
        return ways["lima", "oslo"] == ways["oslo", "lima"] == ways["oslo", "kyoto"] == "through"

    wait_until(is_through, network.ways)
    wait_until(lambda: network.answers("oslo", "lima") and network.answers("quito", "lima"))


def test_addresses_of_ipv6_make_a_pair_direct_that_was_not(network: Network) -> None:
    network.world.add_ipv6()
    wait_until(lambda: network.ways()["lima", "oslo"] == network.ways()["oslo", "lima"] == "direct", network.ways)
    endpoints = network.world.run("lima", "wg", "show", "reach0", "endpoints")
    assert "[2001:db8:23::2]:51820" in endpoints and network.answers("lima", "oslo")


def test_a_node_that_is_killed_ends_the_run_with_a_sentence_and_is_found_again(
    network: Network, tmp_path: Path
) -> None:
    options = [*TINY_RUN, "--training.steps", "100000", "--training.local_batch_size", "5"]
    ranks = network.world.train(
        ["zurich", "kyoto"], tmp_path / "run.log", 29503, [*options, "--job.dump_folder", str(tmp_path)]
    )
    first = tmp_path / "run.zurich"
    try:
        wait_until(lambda: "step" in first.read_text(), first.read_text)
        network.world.lose_power("kyoto", ranks[1].pid)
        said = "zurich - kyoto: kyoto has not answered for 22 s"
        wait_until(lambda: said in network.log("zurich"), lambda: network.log("zurich"))
        wait_until(lambda: f"Read error [{ADDRESS['kyoto']}]" in first.read_text(), first.read_text)
        assert ranks[0].wait(100) != 0
    finally:  # also where it fails: the tests below need the network, and no process of this one
        for rank in ranks:
            rank.kill()
            rank.wait()
        network.join("kyoto")
        wait_until(lambda: network.answers("zurich", "kyoto") and network.answers("kyoto", "lima"))


def test_at_the_end_nothing_is_left(network: Network) -> None:
    world = network.world
    world.run("lima", *PYTHON, "-m", "torchtitan", "reach", "leave")
    world.end_reach("oslo", signal.SIGKILL)
    world.run("oslo", *PYTHON, "-m", "torchtitan", "reach", "leave")  # what a killed one leaves
    for node in ("zurich", "kyoto", "quito", "meet"):
        world.end_reach(node, signal.SIGINT)
    wait_until(lambda: not any(map(world.processes, (*NAMES, "meet"))), world.left)
    assert network.log("meet").endswith("the serving machine ends; direct ways stay up\n")
    for node in NAMES:
        assert "reach0" not in world.run(node, "ip", "link") and world.run(node, "ls", "/run/wireguard") == ""
