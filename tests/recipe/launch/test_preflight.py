"""A preflight's decisions, with nodes as threads of one process; for networks: distributed/test_namespaces.py."""

import json
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from tests import ports
from torchtitan.__main__ import main
from torchtitan.config.load import load_config
from torchtitan.config.schema import Config
from torchtitan.launch import addresses
from torchtitan.launch.node import Node
from torchtitan.launch.preflight import compare, connection, facts, leader, member, report
from torchtitan.launch.start import plan_start
from torchtitan.launch.variables import read_node

ROOT = Path(__file__).parents[3]
ADDRESSES = {"10.0.0.1": "eth0", "10.1.0.1": "eth1", "127.0.0.1": "lo"}


@pytest.fixture
def free_port() -> int:
    return ports.free_port()


@pytest.fixture
def config(tmp_path: Path) -> Config:
    options = ["--job.config_file", str(ROOT / "train_configs/debug_model.toml"), "--job.dump_folder", str(tmp_path)]
    return load_config([*options, "--checkpoint.enable"], 1)


def nodes_of(count: int, port: int, **env: str) -> list[Node]:
    common = {"NNODES": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RDZV_TIMEOUT": "20"}
    return [read_node(common | {"NODE_RANK": str(rank)} | env, gpus=0) for rank in range(count)]


Run = Callable[..., list[bool]]


@pytest.fixture
def run_all(config: Config) -> Iterator[Run]:
    with ThreadPoolExecutor() as pool:
        yield lambda nodes: list(pool.map(lambda node: member.run(node, config, {}, 0), nodes))


def test_nodes_that_are_alike_pass_and_what_was_found_is_a_file(
    run_all: Run, free_port: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_all(nodes_of(3, free_port)) == [True] * 3
    out, err = capsys.readouterr()
    assert err.count("preflight passed") == 3 and "Gbit/s of one TCP stream" in out
    found = json.loads((tmp_path / "preflight.json").read_text())
    drawn = ElementTree.parse(tmp_path / "preflight.svg")
    assert len(drawn.findall(".//{*}rect/{*}title")) == 2 * len(found["pairs"]) > 0
    assert found["errors"] == [] and [node["host"] for node in found["nodes"]] == [socket.gethostname()] * 3
    assert {(p["to"], p["from"]) for p in found["pairs"]} == {(0, 1), (0, 2), (1, 2)}
    assert all(p["gbit_there"] > 0 and p["gbit_back"] > 0 and p["round_trip_ms"] > 0 for p in found["pairs"])
    assert not list((tmp_path / "checkpoint").iterdir())  # the files that tested the folder are gone
    socket.create_server(("127.0.0.1", free_port)).close()  # the port is free for torchrun


def test_one_node_has_nobody_to_meet(run_all: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_all([read_node({}, gpus=0)]) == [True]
    assert "preflight passed" in capsys.readouterr().err


def test_its_verb_ends_with_the_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONFIG_FILE", str(ROOT / "train_configs/debug_model.toml"))
    monkeypatch.setenv("NGPU", "1")
    main(["preflight", "--", "--job.dump_folder", str(tmp_path)])
    with pytest.raises(SystemExit, match="^1$"):
        main(["preflight", "--", "--job.dump_folder", "/proc/nowhere"])


def test_a_dry_run_needs_no_preflight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMM_MODE", "fake_backend")
    main(["preflight"])


def test_ranks_that_torchrun_gives_are_none_yet(config: Config) -> None:
    env = {"PET_NNODES": "2", "PET_RDZV_ENDPOINT": "job-worker-0:23456"}
    with pytest.raises(
        ValueError, match="PET_RDZV_ENDPOINT lets torchrun number the nodes, but a preflight comes before; set"
    ):
        member.run(read_node(env, gpus=0), config, {}, 0)


def test_nodes_told_of_another_number_or_number_of_processes_are_refused(
    run_all: Run, free_port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    first, _ = nodes_of(2, free_port)
    (third,) = nodes_of(3, free_port)[2:]
    assert run_all([first, third]) == [False, False]
    message = "has NODE_RANK = 2 and NNODES = 3, but node 0 has NNODES = 2; set the same NNODES on all nodes"
    assert capsys.readouterr().err.count(message) == 2
    assert run_all([first, nodes_of(2, free_port, NGPU="4")[1]]) == [False, False]
    name = f"({socket.gethostname()})"
    message = f"NGPU: 1 on node 0 {name}, 4 on node 1 {name}; set the same on all nodes"
    assert capsys.readouterr().err.count(message) == 2


def come(node: Node, said: bytes) -> socket.socket:
    joined = connection.connect(node.head, time.monotonic() + 10)
    joined.sendall(said)
    return joined


def join(node: Node, **hello: Any) -> connection.Channel:
    channel = connection.Channel(come(node, b""), 10)
    channel.prove(node.run_id, leads=False)
    channel.send(**hello)
    return channel


def test_a_node_that_leaves_ends_it_for_all_and_strangers_end_nothing(
    config: Config, free_port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    node = nodes_of(3, free_port)[0]
    hello = {"preflight": 1, "port": 1, "facts": facts.gather({}, config, {}, None, 0)}
    with ThreadPoolExecutor() as pool:
        verdict = pool.submit(member.run, node, config, {}, 0)
        strangers = [come(node, said) for said in (b"GET / HTTP/1.1\n\n", b"7\n", b"{}\n", b"")]
        strangers.pop().close()
        for rank in (1, 1, 2):  # node 1 ends and is restarted before all have connected
            peer = join(node, **hello | {"preflight": rank})
            assert peer.receive() == {"do": "wait"}
            peer.close()
        assert not verdict.result(30)
    for stranger in strangers:
        stranger.close()
    assert f"node 1 ({socket.gethostname()}) connected, then dropped out" in capsys.readouterr().err


def test_a_node_that_says_other_things_is_no_pass(
    config: Config, free_port: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    node = nodes_of(2, free_port)[0]
    with ThreadPoolExecutor() as pool:
        verdict = pool.submit(member.run, node, config, {}, 0)
        other = join(node, preflight=1, port=1, facts={"host": "h"})
        assert not verdict.result(30)
        other.close()
    assert "the preflight itself failed on node 0: KeyError(" in capsys.readouterr().err


def test_a_node_that_does_not_know_the_secret_takes_no_part(
    config: Config, free_port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    head, guest = nodes_of(2, free_port, RDZV_TIMEOUT="2")[0], nodes_of(2, free_port, PET_RDZV_ID="another")[1]
    with ThreadPoolExecutor() as pool:
        runs = [
            pool.submit(member.run, head, config, {"PREFLIGHT_SECRET": "a"}, 0),
            pool.submit(member.run, guest, config, {}, 0),
            pool.submit(member.run, guest, config, {"PREFLIGHT_SECRET": "b"}, 0),
        ]
        assert [run.result(30) for run in runs] == [False] * 3
    said = capsys.readouterr().err
    assert said.count("it does not know the secret of this run's nodes; give all nodes the same PREFLIGHT_SECRET") == 2
    assert "did not connect to" in said and "127.0.0.1 connected without the nodes' secret" in said


def test_many_strangers_who_say_little_keep_no_node_waiting(run_all: Run, config: Config, free_port: int) -> None:
    head, other = nodes_of(2, free_port)
    with ThreadPoolExecutor() as pool:
        verdict = pool.submit(member.run, head, config, {}, 0)
        silent = [come(head, b"{") for _ in range(20)]
        begin = time.monotonic()
        assert member.run(other, config, {}, 0) and verdict.result(30)
        assert time.monotonic() - begin < 4  # a silent stranger is heard for five seconds
    for stranger in silent:
        stranger.close()


def test_a_byte_at_a_time_is_no_message_and_a_false_head_is_found_out() -> None:
    ours, theirs = socket.socketpair()
    channel, begin = connection.Channel(ours, 0.5), time.monotonic()
    with ThreadPoolExecutor() as pool:
        pool.submit(lambda: [(time.sleep(0.2), theirs.send(b" ")) for _ in range(5)])
        with pytest.raises(TimeoutError):
            channel.receive()
    assert time.monotonic() - begin < 3
    theirs.sendall(json.dumps({"challenge": "c"}).encode() + b"\n" + json.dumps({"proof": "p"}).encode() + b"\n")
    channel.seconds = 5
    with pytest.raises(connection.NotANode):
        channel.prove("secret", leads=False)
    theirs.sendall(json.dumps({"host": "\x1b[2Jnode\n", "of": ["\x07", 3]}).encode() + b"\n")
    assert channel.receive() == {"host": "?[2Jnode?", "of": ["?", 3]}
    channel.close()
    theirs.close()


def test_what_is_not_node_0_is_told_from_it(config: Config, free_port: int, capsys: pytest.CaptureFixture[str]) -> None:
    node = nodes_of(2, free_port)[1]
    with socket.create_server(("127.0.0.1", free_port)) as server, ThreadPoolExecutor() as pool:
        verdict = pool.submit(member.run, node, config, {}, 0)
        server.accept()[0].close()
        assert not verdict.result(30)
    assert f"the connection to the head 127.0.0.1:{free_port} broke off" in capsys.readouterr().err


def test_where_gloo_listens_is_found_by_its_own_rule() -> None:
    assert addresses.gloo_address({"GLOO_SOCKET_IFNAME": "eth1,eth0"}, ADDRESSES) == "10.1.0.1"
    assert addresses.gloo_address({}, {}) in {found[4][0] for found in socket.getaddrinfo(socket.gethostname(), 0)}


def test_the_network_of_a_node_has_names() -> None:
    assert addresses.own_addresses()["127.0.0.1"] == "lo"
    assert addresses.in_words(ADDRESSES) == "eth0 (10.0.0.1), eth1 (10.1.0.1)"
    assert [addresses.interface_of(a, ADDRESSES) for a in ("10.1.0.1", "127.0.1.1", "9.9.9.9", None)] == [
        "eth1",
        "lo",
        "?",
        "?",
    ]
    assert addresses.split_endpoint("[fd00::1]:29500") == ("fd00::1", 29500)
    assert addresses.address_toward("127.0.0.1") == "127.0.0.1" and addresses.address_toward("no.such.name.") is None
    assert not addresses.leads_here("no.such.name.", ADDRESSES)


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"GLOO_SOCKET_IFNAME": "ib0"}, "GLOO_SOCKET_IFNAME = ib0, but this node has no such .* one of eth0"),
        ({"NCCL_SOCKET_IFNAME": "ib"}, "NCCL_SOCKET_IFNAME = ib leaves no interface of this node; use one of eth0"),
        ({"NCCL_SOCKET_IFNAME": "=eth"}, "NCCL_SOCKET_IFNAME = =eth leaves no interface"),
        ({"NCCL_SOCKET_IFNAME": "^eth,lo"}, r"NCCL_SOCKET_IFNAME = \^eth,lo leaves no interface"),
    ],
)
def test_an_interface_that_is_not_there_is_refused_by_name(env: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        addresses.nccl_interfaces(env, ADDRESSES)
        addresses.gloo_address(env, ADDRESSES)


def test_interfaces_may_be_named_by_nccls_own_ways() -> None:
    for named in ("", "eth", "=eth1", "^docker,lo", "ib0,eth1"):
        addresses.nccl_interfaces({"NCCL_SOCKET_IFNAME": named}, ADDRESSES)


def test_a_host_whose_name_means_loopback_is_met_on_its_way_to_the_head(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "own_addresses", lambda: ADDRESSES)
    monkeypatch.setattr(addresses, "address_toward", lambda host: {"10.0.0.9": "10.0.0.1"}.get(host))
    monkeypatch.setattr(addresses, "gloo_address", lambda env, addresses: meant)
    config = {"CONFIG_FILE": str(ROOT / "train_configs/debug_model.toml"), "NNODES": "2", "NODE_RANK": "1", "NGPU": "1"}
    env = config | {"MASTER_ADDR": "10.0.0.9"}
    meant = "127.0.1.1"
    assert plan_start(env, [], 0).settings["GLOO_SOCKET_IFNAME"] == "eth0"
    assert "GLOO_SOCKET_IFNAME" not in plan_start(env | {"GLOO_SOCKET_IFNAME": "eth1"}, [], 0).settings
    assert "GLOO_SOCKET_IFNAME" not in plan_start(env | {"MASTER_ADDR": "127.0.0.1"}, [], 0).settings
    assert "--local_addr=10.0.0.1" in plan_start(env | {"MAX_RESTARTS": "1"}, [], 0).arguments
    meant = "10.1.0.1"  # an address that is not loopback is kept
    assert "GLOO_SOCKET_IFNAME" not in plan_start(env, [], 0).settings
    assert not any("local_addr" in word for word in plan_start(env | {"MAX_RESTARTS": "1"}, [], 0).arguments)


@pytest.mark.parametrize("count", [1, 2, 5, 8])
def test_every_pair_meets_once_and_no_node_twice_in_a_round(count: int) -> None:
    rounds = leader.plan_rounds(count)
    pairs = [pair for pairs in rounds for pair in pairs]
    assert sorted(pairs) == [(a, b) for a in range(count) for b in range(a + 1, count)]
    assert all(len({node for pair in pairs for node in pair}) == 2 * len(pairs) for pairs in rounds)


def node_facts(**kinds: Any) -> dict[str, Any]:
    alike = {
        "host": "h",
        "launch": {},
        "code": {"a.py": "1"},
        "config": {},
        "versions": {},
        "problems": [],
        "devices": [],
    }
    return alike | kinds


def test_what_differs_is_named_with_those_who_have_it() -> None:
    assert compare.differences([node_facts()] * 3) == []
    nodes = [node_facts(), node_facts(code={"a.py": "2"}, versions={"torch": "2.11"}, problems=["no"]), node_facts()]
    assert compare.differences(nodes) == [
        "node 1 (h): no",
        "a.py: one on nodes 0, 2, another on node 1 (h); give all nodes the same checkout or image",
        "torch: absent on nodes 0, 2, 2.11 on node 1 (h); install the same on all nodes",
    ]
    many = compare.differences([node_facts(), node_facts(code={f"{i}.py": "" for i in range(9)})])
    assert len(many) == 7 and many[-1] == "and 4 more of this kind"
    assert compare.in_short(range(10)) == "nodes 0, 1, 2, 3, 4, 5, 6, 7 and 2 more"


def test_a_sick_gpu_is_a_problem_and_a_slow_one_a_note() -> None:
    listed = [
        {"uuid": f"GPU-{i}", "ecc.errors.uncorrected.volatile.total": "[N/A]", "memory.used": "3"} for i in range(4)
    ]
    listed[1]["ecc.errors.uncorrected.volatile.total"] = "2"
    listed[2] |= {"ecc.errors.uncorrected.volatile.total": "[Not Supported]", "memory.used": "[N/A]"}
    listed[3]["memory.used"] = "40000"
    checks = [{"uuid": str(i), "name": "H100", "exact": i != 2, "tflops": 300 if i == 3 else 700} for i in (3, 2, 1)]
    devices = facts.judge_gpus(listed, checks)  # torch sees three of the four, in another order
    assert [device.pop("problems") for device in devices] == [
        [],
        ["GPU 1 multiplies matrices wrongly; leave it out"],
        ["GPU 2 has 2 uncorrected memory errors; reset it or leave it out"],
    ]
    assert compare.gpu_notes([node_facts(devices=devices)]) == [
        "node 0 (h): GPU 0 has 40000 MiB in use by another program",
        "node 0 (h): GPU 0 computes at 300 TFLOP/s, the median H100 here at 700",
    ]


@pytest.mark.parametrize(
    ("computes", "problem"),
    [
        ("echo '[]'", "torch sees none; install a CUDA build of torch that fits the driver"),
        ("echo 'Error: no CUDA' >&2; exit 1", "Error: no CUDA"),
        ("kill -9 $$", "the computation that tests them was killed"),
    ],
)
def test_gpus_that_torch_cannot_use_are_a_problem(
    computes: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, body in (("nvidia-smi", "echo 'GPU-1, 80000, 3, 0, 580.1'"), ("python", computes)):
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert facts.check_gpus() == [{"problems": [f"nvidia-smi shows GPUs, but they cannot be used: {problem}"]}]


def test_of_many_nodes_the_slow_pairs_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    nodes = [node_facts(address="10.0.0.1", addresses=ADDRESSES, cores=4) for _ in range(40)]
    pairs = [
        {"to": a, "from": b, "gbit_there": 1.0 if b == 7 else 10.0, "gbit_back": 10.0, "round_trip_ms": 0.1}
        for pairs in leader.plan_rounds(40)
        for a, b in pairs
    ]
    found = {"nodes": nodes, "pairs": pairs, "rounds": "20 of 39 rounds", "warnings": []}
    slow = report.slow_pairs(found)
    assert slow[0] == "node 7 (h) to node 0 (h): 1.00 Gbit/s, less than half of the median, 10.00" and len(slow) == 7
    report.print_report(found | {"warnings": slow})
    out = capsys.readouterr().out
    assert "and 24 more nodes" in out and "20 of 39 rounds: 1.00 to 10.00 Gbit/s" in out and f"note: {slow[0]}" in out


def test_a_message_has_an_end_and_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "LONGEST_MESSAGE_BYTES", 100)
    for said, wrong in (
        (b"{", "hung up"),
        (b"x" * 200, "not a message"),
        (b"[]\n", "not a message"),
        (b"{]\n", "not a message"),
    ):
        ours, theirs = socket.socketpair()
        channel = connection.Channel(ours, 5)
        theirs.sendall(said)
        theirs.close()
        with pytest.raises(ConnectionError, match=wrong):
            channel.receive()
        channel.close()


def test_a_pair_that_connects_and_says_nothing_more_is_not_unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(member, "_PAIR_SECONDS", 1.2)
    with connection.listen(0, "127.0.0.1") as silent, connection.listen(0, "127.0.0.1") as unused:
        order = {"token": "t", "to": silent.getsockname()[:2]}
        assert member._measure(order, unused)["error"].startswith(
            "they connect, but then data stops arriving (timed out):"
        )


def test_words_that_come_in_pieces_are_put_together() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, ThreadPoolExecutor() as pool:
        ours.settimeout(5)
        theirs.sendall(b"pi")
        received = pool.submit(connection.receive_exactly, ours, 4)
        time.sleep(0.1)
        theirs.sendall(b"ng")
        assert received.result(5) == b"ping"


def test_versions_are_those_of_all_that_is_pinned() -> None:
    pinned = re.findall(r"^([\w.-]+)==", (ROOT / "requirements.txt").read_text(), re.MULTILINE)
    assert pinned and set(pinned) <= facts.versions([]).keys()


def test_a_measurement_ends_with_its_other_end() -> None:
    with connection.listen(0, "127.0.0.1") as server, ThreadPoolExecutor() as pool:
        leads = connection.connect(f"127.0.0.1:{server.getsockname()[1]}", time.monotonic() + 5)
        follows = server.accept()[0]
        measured = pool.submit(connection.measure_with, leads, True)
        assert follows.recv(4) == b"ping"
        follows.close()
        with pytest.raises(ConnectionError, match="the other end hung up"):
            measured.result(10)
        leads.close()


def test_a_folder_that_cannot_be_read_is_no_broken_connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> str:
        raise PermissionError(13, "Permission denied")

    (tmp_path / "token").write_text("x")
    monkeypatch.setattr(Path, "read_text", refuse)
    assert member._look_and_leave(tmp_path / "token", "x", 1) == "cannot read there (Permission denied)"
