"""`launch ssh` without a network: its ssh is a script that runs the node program here, and its jobs start at once."""

import argparse
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.node.machines import CODE, HASH, ROOT, processes_of
from torchtitan.__main__ import main
from torchtitan.launch.ssh import pack, terminal
from torchtitan.launch.ssh.client import Node
from torchtitan.launch.ssh.hosts import Host
from torchtitan.launch.ssh.pack import Packed
from torchtitan.launch.ssh.parts import Job, Part, address_of, at_once
from torchtitan.node import report
from torchtitan.refusal import Refusal

SSH = f"""#!/bin/sh
while [ $# -gt 2 ]; do shift; done
cd {ROOT}
HOST=$1 exec sh -c "$2"
"""
HOSTS = [Host(host=name, address="127.0.0.1", gpus=0) for name in "ab"]
Make = Callable[..., terminal._Launch]
linux = pytest.mark.skipif(sys.platform != "linux", reason="runs are started on Linux alone")


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Make]:
    """Makes launches with the checkout of the tests; each host has a home of its own."""
    (tmp_path / "ssh").write_text(SSH)
    (tmp_path / "ssh").chmod(0o755)
    (tmp_path / "code").write_bytes(CODE)
    there = f"exec {sys.executable} -m torchtitan node --home {tmp_path}/$HOST"
    made: list[terminal._Launch] = []

    def make(name: str, config: str, needs_disk: bool = False) -> terminal._Launch:
        args = argparse.Namespace(home="", ssh=str(tmp_path / "ssh"), program=f"sh -c '{there}'")
        made.append(
            terminal._Launch(args, HOSTS, Job(name, config, needs_disk), Packed(tmp_path / "code", HASH, [], []))
        )
        at_once(made[-1].connect, made[-1].members)
        return made[-1]

    yield make
    for one in made:
        one.stop(0)
        at_once(lambda member: member.node.close(), one.members)
    assert processes_of(tmp_path / "a") == processes_of(tmp_path / "b") == {}


@linux
def test_all_logs_are_shown_until_all_nodes_have_ended(launch: Make, capsys: pytest.CaptureFixture[str]) -> None:
    run = launch("good", "lines = 3")
    run.start()
    assert run.watch() == 0
    said = capsys.readouterr()
    assert sorted(said.out.splitlines()) == [f"[{host}] line {number}" for host in "ab" for number in range(3)]
    assert said.err.count("has taken the checkout") == 2 and "[b] ended: " in said.err


@linux
def test_a_node_that_fails_ends_the_run(
    launch: Make, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(terminal, "SECONDS_AFTER_A_FAILURE", 0.2)
    run = launch("failing", "node 1 fails, lines = 100000")
    run.start()
    assert run.watch() != 0
    said = capsys.readouterr().err
    assert "[b] failed, exit code 3" in said and re.search(r"^\[a\] stopped", said, re.MULTILINE)


@linux
def test_a_second_ctrl_c_does_not_wait(launch: Make, capsys: pytest.CaptureFixture[str]) -> None:
    run, said = launch("deaf", "deaf, lines = 100000"), [""]

    def press() -> None:
        for awaited in (r"deaf now.*\n(.*\n)*.*deaf now", "asking all nodes"):
            while not re.search(awaited, said[0]):
                said[0] += "".join(capsys.readouterr())
                time.sleep(0.05)
            signal.raise_signal(signal.SIGINT)

    with run.interrupts():
        run.start()
        threading.Thread(target=press, daemon=True).start()
        assert run.watch() == 128 + 9
    assert "[a] stopped" in said[0] + capsys.readouterr().err


@linux
def test_a_start_that_is_refused_stops_no_other_run_of_that_name(launch: Make) -> None:
    first, second = launch("same", "lines = 100000"), launch("same", "lines = 1")
    first.start()
    with pytest.raises(Refusal, match="run = same exists already"):
        second.start()
    second.stop(0)
    assert [row.state for member in first.members if (row := member.row("same"))] == ["running", "running"]


@linux
def test_a_run_that_has_to_share_a_disk_is_not_started_without_one(launch: Make) -> None:
    with pytest.raises(Refusal, match="which b does not share; use a --home on a disk"):
        launch("apart", "lines = 100000", needs_disk=True).start()


def test_launch_ssh_prints_the_hosts_and_starts_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    main(["launch", "ssh", "--hosts", "examples/nodes.toml", "--print"])
    assert re.findall(r"node (\d) of 2: ssh .* -- (\S+)", capsys.readouterr().out) == [("0", "gpu1"), ("1", "gpu2")]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ([], "no --hosts is given"),
        (["--hosts", "absent.txt"], "absent.txt"),
        (["--hosts", "examples/nodes.toml", "--nodes", "2"], "--nodes does not work for ssh"),
        (["--hosts", "examples/nodes.toml", "--", "--training.step", "2"], None),
    ],
)
def test_launch_ssh_refuses_before_it_connects(
    words: list[str], why: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit) as refused:
        main(["launch", "ssh", *words])
    assert why is None or why in str(refused.value)


def test_the_nodes_meet_at_the_head_s_one_address(monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node("head", [])
    part = Part(Host(host="head"), node)
    known = report.report(1, ROOT, [])
    for addresses, expected in ({"10.0.0.1": "eth0", "127.0.0.1": "lo"}, "10.0.0.1"), ({"fd00::5": "eth0"}, "fd00::5"):
        node.report = known.model_copy(update={"addresses": addresses})
        assert address_of(part, ["ssh"]) == expected
    node.report = known.model_copy(update={"addresses": {"10.0.0.1": "eth0", "10.0.0.2": "eth1"}})
    with pytest.raises(Refusal, match="give its host an address="):
        address_of(part, ["true"])
    with pytest.raises(Refusal, match="an installed package is none"):
        monkeypatch.setattr(pack, "INSIDE", ROOT)
        with pack.packed_checkout():
            pass
