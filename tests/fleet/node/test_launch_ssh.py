"""`launch ssh` without a network: its ssh is a script that runs the node program here, and its jobs start at once."""

import argparse
import json
import os
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.fleet.node.machines import CODE, HASH, ROOT, wait_until_nothing_runs
from titan_fleet.node import report
from titan_fleet.node.messages import MOST_ROWS, read_answer, write
from titan_fleet.ssh import pack, terminal
from titan_fleet.ssh.client import Node, ssh_command
from titan_fleet.ssh.hosts import Host
from titan_fleet.ssh.install import bring_up, program
from titan_fleet.ssh.pack import Packed
from titan_fleet.ssh.parts import Job, Part, address_of, at_once, start
from torchtitan.__main__ import main
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
        args = argparse.Namespace(image=None, home="", ssh=str(tmp_path / "ssh"), program=f"sh -c '{there}'")
        made.append(
            terminal._Launch(args, HOSTS, Job(name, config, needs_disk), Packed(tmp_path / "code", HASH, [], []))
        )
        at_once(made[-1].connect, made[-1].members)
        return made[-1]

    yield make
    for one in made:
        one.stop(0)
        at_once(lambda member: member.node.close(), one.members)
    wait_until_nothing_runs(tmp_path / "a", tmp_path / "b")


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


@linux
def test_a_shared_disk_is_recognised_however_many_files_the_run_has(launch: Make, tmp_path: Path) -> None:
    checkpoints = tmp_path / "a/runs/large/checkpoint"
    checkpoints.mkdir(parents=True)
    (tmp_path / "b").symlink_to("a")
    for number in range(MOST_ROWS + 1):
        (checkpoints / str(number)).touch()
        os.utime(checkpoints / str(number), (9e9, 9e9))  # newer than the log, so a list of files has no room for it
    run = launch("large", "lines = 1", needs_disk=True)
    run.start()
    assert run.watch() == 0


DOCKER = f"""#!/bin/sh
echo "$@" >>"$HOME_OF_TEST/said"
case "$1" in
  container) [ -e "$HOME_OF_TEST/runs" ] ;;
  run) touch "$HOME_OF_TEST/runs"; echo 0123abcd ;;
  exec) cd "$4"; shift 6; exec {sys.executable} "$@" ;;
esac
"""


@linux
def test_an_image_gives_a_bare_host_its_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in (("ssh", SSH), ("docker", DOCKER)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("HOME_OF_TEST", str(tmp_path))
    home, ssh, packed = str(tmp_path / "home"), [str(tmp_path / "ssh")], pack.pack(ROOT, tmp_path)
    for _ in range(2):  # the container is there the second time
        bring_up("a", packed, home, ssh, lambda line: None, "registry/recipe:1")
    node = Node("a", ssh_command("a", program(home, packed.code), ssh))
    assert node.connect().home == home
    node.close()
    looked, ran, again, *rest = (tmp_path / "said").read_text().splitlines()
    name = looked.split()[-1]
    who = f"--user {os.getuid()}:{os.getgid()}"
    gpus = " --gpus all" if shutil.which("nvidia-smi") else ""
    kept = f"--network host --ipc host {who}{gpus} --env HOME={home} --volume {home}:{home}"
    assert ran == f"run --detach --init --name {name} {kept} registry/recipe:1 sleep infinity"
    place = f"exec --interactive --workdir {home}/code/{packed.code} {name}"
    assert [again, *rest] == [looked, f"start {name}", f"{place} python3 -m torchtitan node --home {home}"]
    (tmp_path / "docker").unlink()
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    if not (shutil.which("docker") or shutil.which("podman")):
        with pytest.raises(Refusal, match="neither docker nor podman is here"):
            bring_up("a", packed, home, ssh, lambda line: None, "registry/recipe:1")


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
        (
            ["--hosts", "examples/nodes.toml", "--image", "a", "--program", "b"],
            "--image a sets hosts up",
        ),
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


def test_hosts_with_unlike_numbers_of_gpus_are_refused_before_anything_starts() -> None:
    given = (("a", 4), ("b", 8), ("c", None))
    parts = [Part(Host(host=name, gpus=gpus), Node(name, [])) for name, gpus in given]
    with pytest.raises(Refusal, match=r"unlike gpus \(a 4, b 8, c None\), and a run has as many ranks on each"):
        start(Job("run", "", needs_disk=False), HASH, parts, [])


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
    line = json.loads(write(known)) | {"addresses": {"\x1b]0;title\x07": "eth0"}}
    refused = read_answer(json.dumps(line).encode())
    assert refused.kind == "refused" and "]0;title" in refused.why and refused.why.isprintable()
    with pytest.raises(Refusal, match="an installed package is none"):
        monkeypatch.setattr(pack, "INSIDE", ROOT)
        with pack.packed_checkout():
            pass
