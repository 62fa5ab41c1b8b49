"""`python -m torchtitan netem`: it emulates what was asked, passes exit codes on, and leaves nothing behind."""

import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from titan_planner.netem import interface as netem_interface
from titan_planner.netem import sites as netem_sites
from titan_planner.netem.measure import Link
from titan_planner.netem.namespaces import entered, unshared
from titan_planner.netem.sites import Sites
from torchtitan.__main__ import main
from torchtitan.refusal import Refusal

ROOT = Path(__file__).parents[2]
NETEM = [sys.executable, "-m", "torchtitan", "netem"]
THREE = """
[[case]]
name = "three"
regions = ["Ohio", "Tokyo", "Tokyo"]
delay_ms = [[0, 20, 50], [20, 0, 5], [40, 5, 0]]
gbit = [[1, 0.05, 0.01], [0.05, 1, 0.02], [0.02, 0.02, 1]]
"""


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> str:
    try:
        unshared("--pid", "--fork", "--kill-child", "--mount-proc")
    except Refusal as refusal:
        pytest.skip(str(refusal))
    file = tmp_path_factory.mktemp("network") / "three.toml"
    file.write_text(THREE)
    return str(file)


def netem(*words: str, **options: Any) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([*NETEM, *words], cwd=ROOT, capture_output=True, text=True, timeout=100, **options)


def processes_with(mark: str) -> list[str]:
    found = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout
    return [line for line in found.splitlines() if mark in line and "ps -eo" not in line]


def test_links_are_as_asked_in_both_directions_and_the_exit_code_comes_back(network: str) -> None:
    told = "touch /dev/shm/$SITE; sleep 1; echo $NODE_RANK of $NNODES at $(ls /dev/shm), head $MASTER_ADDR;"
    told += "exit $((3 * (NODE_RANK == 1)))"
    for _ in range(5):  # on a busy machine a link may be off
        done = netem(network, "--order", "2,0,1", "--measure", "0", "--", "bash", "-c", told)
        if "is not as asked" not in done.stderr:
            break
    assert done.returncode == 3, done.stdout + done.stderr
    number = r"([\d.]+)"
    row = rf"^(\S+) +(\S+) +{number} ms +{number} ms +{number} Mbit/s +{number} Mbit/s$"
    rows = re.findall(row, done.stdout, re.MULTILINE)
    asked = {(one, other): (float(delay), float(rate)) for one, other, delay, _, rate, _ in rows}
    assert asked["Ohio-0", "Tokyo-1"] == (50, 10) and asked["Tokyo-1", "Ohio-0"] == (40, 20) and len(asked) == 6
    for *_, delay, delay_found, rate, rate_found in rows:
        assert float(delay_found) == pytest.approx(float(delay), rel=0.1)
        assert float(rate_found) == pytest.approx(float(rate), rel=0.1)
    for rank, site in enumerate(("Tokyo-1", "Ohio-0", "Tokyo-0")):
        assert f"{rank} {site:7} | {rank} of 3 at {site}, head 10.77.0.3\n" in done.stdout


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["SIGTERM", "SIGKILL"])
def test_a_killed_run_leaves_nothing_behind(network: str, number: int) -> None:
    mark = str(54321 + number)
    command = [*NETEM, network, "--measure", "1", "--", "sh", "-c", f"echo started; setsid sleep {mark}"]
    run = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None
    while "started" not in (line := run.stdout.readline()):
        assert line
    time.sleep(0.5)
    assert processes_with(mark)
    run.send_signal(number)
    run.wait(20)
    end = time.monotonic() + 10
    while processes_with(mark) and time.monotonic() < end:
        time.sleep(0.1)
    assert not processes_with(mark)


@pytest.mark.all  # it sends some gigabytes
def test_a_network_that_this_machine_cannot_carry_is_refused(network: str) -> None:
    done = netem(network, "--measure", "1", "--rate_factor", "1000", "--", "echo", "ran")
    assert done.returncode == 1 and "ran" not in done.stdout
    assert "from Ohio-0 to Tokyo-0 is not as asked" in done.stderr and "--rate_factor" in done.stderr


def test_a_link_that_is_measured_more_than_a_tenth_off_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {(0, 1): (0.021, 1e9), (1, 0): (0.02, 0.8e9)}

    def measured(link: Link, *_: object) -> Link:
        return replace(link, measured=found[link.origin, link.target])

    monkeypatch.setattr(netem_sites, "measure", measured)
    sites = Sites(["a", "b"], [[0, 0.02], [0.02, 0]], [[1e9] * 2] * 2, [0, 1], 0, False, 29500, ["true"])
    with pytest.raises(Refusal, match="the link from b to a is not as asked; .* a smaller --rate_factor"):
        netem_sites.check(sites)
    netem_sites.check(replace(sites, anyway=True))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["FILE"], "no command is given"),
        (["--", "true"], "give either a FILE with a network, or --interface"),
        (["FILE", "--case", "four", "--", "true"], "--case four names 0 networks"),
        (["FILE", "--order", "0,1", "--", "true"], "--order 0,1 is not each of the 3 sites once"),
        (["FILE", "--rate_factor", "0", "--", "true"], "a rate is not above 0"),
        (["--interface", "no0", "--gbit", "1", "--", "true"], "--interface no0 is not on this machine; use one of lo"),
        (["--interface", "lo", "--", "true"], "give a rate above 0"),
    ],
)
def test_what_cannot_be_emulated_is_refused(network: str, words: list[str], message: str) -> None:
    with pytest.raises(SystemExit) as refused:
        main(["netem", *[network if word == "FILE" else word for word in words]])
    assert message in str(refused.value)


CABLE = """
set -e
mount -t tmpfs tmpfs /run; mkdir /run/netns
ip netns add far
ip link add near type veth peer name far netns far
ip address add 10.78.0.1/24 dev near; ip link set near up
ip -n far address add 10.78.0.2/24 dev far; ip -n far link set far up
echo ready; exec sleep 100
"""
ROUND_TRIP = """
import socket, subprocess, sys, time
server = "import socket; s = socket.create_server(('10.78.0.2', 7000)); print(1, flush=True)"
server += "; [s.accept() for _ in range(3)]"
far = subprocess.Popen(["ip", "netns", "exec", "far", sys.executable, "-c", server], stdout=-1)
far.stdout.readline()
times = []
for _ in range(3):  # the fastest: other tests take the cores
    begin = time.monotonic()
    socket.create_connection(("10.78.0.2", 7000))
    times.append(time.monotonic() - begin)
print("round trip", min(times), flush=True)
"""


def test_an_interface_is_slowed_down_and_as_before_afterwards(network: str) -> None:
    holder = subprocess.Popen([*unshared(), "sh", "-c", CABLE], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "ready\n"
        there = [*entered(holder.pid), f"--wd={ROOT}"]

        def qdiscs() -> str:
            return subprocess.run([*there, "tc", "qdisc", "show", "dev", "near"], capture_output=True, text=True).stdout

        before = qdiscs()
        slow = [*there, *NETEM, "--interface", "near", "--gbit", "0.01", "--delay_ms", "60", "--"]
        done = subprocess.run([*slow, sys.executable, "-c", ROUND_TRIP], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        assert 0.06 <= float(done.stdout.split()[-1]) < 0.2
        assert qdiscs() == before
        for number in (signal.SIGTERM, signal.SIGKILL):
            run = subprocess.Popen(
                [*slow, "sh", "-c", "echo started; exec sleep 100"], stdout=subprocess.PIPE, text=True
            )
            assert run.stdout is not None and run.stdout.readline() == "started\n"
            assert qdiscs() != before
            run.send_signal(number)
            run.wait(20)
            end = time.monotonic() + 10
            while qdiscs() != before and time.monotonic() < end:
                time.sleep(0.1)
            assert qdiscs() == before
        subprocess.run([*there, "tc", "qdisc", "add", "dev", "near", "root", "handle", "5:", "htb"], check=True)
        done = subprocess.run([*slow, "true"], capture_output=True, text=True)
        assert done.returncode == 1 and "near is shaped already (qdisc htb 5:" in done.stderr
    finally:
        holder.kill()
        holder.wait()


def test_only_what_this_tool_names_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, ...]] = []
    shown = {"qdisc": "qdisc htb 1: root refcnt 2", "filter": "mirred (Egress Redirect to device other)"}
    monkeypatch.setattr(netem_interface, "_tc", lambda *words: asked.append(words) or shown[words[0]])
    netem_interface.undo("eth9")
    assert [words[1] for words in asked] == ["show", "show"]
