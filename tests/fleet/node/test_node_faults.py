"""A cable that is pulled and put back, and a disk that is full: the state right afterwards, and the log's bytes."""

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.fleet.node.machines import CODE, HASH, Program, pieces, processes_of, wait_until_nothing_runs
from tests.fleet.node.test_client import Heard
from tests.fleet.node.test_ssh import Hosts, hosts  # noqa: F401  (a fixture)
from titan_fleet.node import messages
from titan_fleet.ssh.client import Node, ssh_command

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux" or os.getuid() != 0, reason="needs root on Linux"),
]


def wait_for(look: Callable[[], object]) -> None:
    end = time.monotonic() + 60
    while not look():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_cut_network_loses_and_doubles_no_line_once_it_heals(hosts: Hosts) -> None:  # noqa: F811
    if hosts.holder is None:
        pytest.skip("this kernel gives no network namespaces")
    # The first value counts: a dead line is noticed within 2 s instead of 45.
    ssh = [*hosts.enter, *hosts.ssh.split(), "-oServerAliveInterval=1", "-oServerAliveCountMax=2"]
    node = Node("keyed", ssh_command("keyed", ["forced"], ssh))
    node.connect()
    (hosts.folder / "archive").write_bytes(CODE)
    node.put(hosts.folder / "archive", HASH)
    node.ask(messages.Start, run="cut", config="pause lines = 1000", code=HASH)
    heard = Heard()
    node.follow("cut", "node/0/output.log", heard)
    heard.wait(3000)

    def link(state: str) -> None:
        subprocess.run([*hosts.enter, "ip", "-n", "node1", "link", "set", "eth0", state], check=True)

    link("down")
    (hosts.folder / "keyed/runs/cut/node/0/job.toml.go").touch()  # it writes on meanwhile
    wait_for(lambda: node.trouble)
    link("up")
    heard.wait()
    assert heard.data.decode().splitlines() == [f"line {number}" for number in range(1000)]
    (row,) = [row for row in node.ask(messages.Runs).runs if row.run == "cut"]
    assert (row.state, row.exit_code) == ("ended", 0)
    hosts.wait_until_nothing_runs()
    node.close()


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    if (
        shutil.which("mount") is None
        or subprocess.run(["mount", "-t", "tmpfs", "-osize=256k", "none", tmp_path]).returncode
    ):
        pytest.skip("nothing can be mounted here")
    yield tmp_path
    subprocess.run(["umount", "--lazy", tmp_path], check=True)


def test_a_disk_that_fills_while_the_log_is_followed_ends_the_run_and_the_end_is_written_once_there_is_space(
    small: Path,
) -> None:
    program = Program(small)
    assert program.ask(**pieces(CODE))["is_here"]
    assert program.start("fills", "lines = 100000")["kind"] == "start"
    log = small / "runs/fills/node/0/output.log"
    wait_for(lambda: log.exists() and log.stat().st_size > 100)
    with (small / "ballast").open("wb", buffering=0) as ballast, contextlib.suppress(OSError):
        while True:
            ballast.write(b"x" * 4096)
    wait_for(lambda: len(processes_of(small)) == 1)  # the run has ended on the error; its keeper waits
    whole = log.read_bytes()
    answer = program.ask(do="follow", run="fills", path="node/0/output.log")
    assert (answer["size"], answer["is_end"]) == (len(whole), False)
    assert program.row("fills")["state"] == "running"
    (small / "ballast").unlink()
    assert program.wait("fills", "failed")["exit_code"] != 0
    assert program.ask(do="follow", run="fills", path="node/0/output.log", position=answer["size"])["is_end"]
    program.close()
    wait_until_nothing_runs(small)
