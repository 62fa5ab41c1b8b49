"""Runs of several nodes as the console sees them: one of which a part fails, and a probe of the links.

Its ssh is a script that runs the node program here, as in tests/fleet/node/test_launch_ssh.py.
"""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import ValidationError

from tests.fleet.console.served import wait_for, write_run
from tests.fleet.node.machines import CODE, HASH, ROOT, wait_until_nothing_runs
from tests.fleet.node.test_launch_ssh import SSH, linux
from titan_fleet.console import links
from titan_fleet.console.actions import Actions
from titan_fleet.console.answers import TagRun
from titan_fleet.console.database import Audit, Kept, open_database
from titan_fleet.console.door.people import People, Person
from titan_fleet.console.failures import Failures
from titan_fleet.console.library import Library
from titan_fleet.console.nodes import Nodes
from titan_fleet.node import messages
from titan_fleet.ssh import client
from titan_fleet.ssh.hosts import Host
from titan_fleet.ssh.parts import Job, Part, start
from titan_fleet.ssh.probe import probe_of
from torchtitan.refusal import Refusal

Look = Callable[[], Nodes]


@pytest.fixture
def look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Look]:
    """Makes consoles' views of two machines, each with a home of its own."""
    (tmp_path / "ssh").write_text(SSH)
    installed = f'#!/bin/sh\nexec {sys.executable} -m torchtitan "$@" --home {tmp_path}/$HOST\n'
    (tmp_path / "torchtitan-recipe").write_text(installed)
    for name in ("ssh", "torchtitan-recipe"):
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    (tmp_path / "code").write_bytes(CODE)
    host = '[[node]]\nhost = "a"\naddress = "127.0.0.1"\ngpus = 0\n'
    watched = f'[[node]]\nhost = "b"\ngpus = 0\nwatch = ["{tmp_path}/theirs", "{tmp_path}/none"]\n'
    (tmp_path / "nodes.toml").write_text(host + watched)
    made: list[Nodes] = []

    def make() -> Nodes:
        made.append(Nodes(tmp_path / "here", tmp_path / "nodes.toml", [str(tmp_path / "ssh")], "unused"))
        made[-1].start()
        wait_for(lambda: not any(made[-1].find(name).trouble for name in "ab"))
        return made[-1]

    yield make
    for nodes in made:
        nodes.close()
    wait_until_nothing_runs(tmp_path / "a", tmp_path / "b")


def parts_on(nodes: Nodes, folder: Path) -> list[Part]:
    parts = [Part(nodes.find(name).host, nodes.find(name).node, rank) for rank, name in enumerate("ab")]
    for part in parts:
        part.node.put(folder / "code", HASH)
    return parts


@linux
def test_when_one_node_s_part_fails_a_restarted_console_ends_the_others_and_writes_it_down(look, tmp_path):
    first = look()
    parts = parts_on(first, tmp_path)
    for name, config in ("failing", "node 1 fails, lines = 100000"), ("other", "lines = 100000"):
        start(Job(name, config, needs_disk=False), HASH, parts, [])
    first.close()

    second, audit = look(), Audit(open_database(tmp_path / "here"))
    library = Library(tmp_path / "here", [], second)
    watch = Failures(library, audit, seconds=1)

    def states() -> dict[tuple[str, str], str]:
        library.refresh()
        watch.look()
        return {(entry.row.run, entry.page.node): entry.row.state for entry in library.entries()}

    wait_for(lambda: states().get(("failing", "b")) == "failed")
    assert states()["failing", "a"] == "running"  # it has a moment to say what it saw
    wait_for(lambda: states()["failing", "a"] == "stopped")
    assert states()["other", "a"] == states()["other", "b"] == "running"
    done = [(row.who, row.what, row.target, row.outcome) for row in audit.newest(10)]
    assert done == [("console", "end", "failing on a", "done: node 1 on b failed with exit code 3")]
    for part in parts:
        second.find(part.name).node.ask(messages.Stop, run="other", seconds=0)


@linux
def test_a_probe_of_the_nodes_becomes_a_map_of_their_links_and_leaves_no_run(look, tmp_path):
    nodes = look()
    parts, hosts = parts_on(nodes, tmp_path), [nodes.find(name).host for name in "ab"]
    file = tmp_path / "clusters/here.toml"
    assert links.read_links(file) is None
    with pytest.raises(Refusal, match="a probe of 1 node measures no link"):
        probe_of(hosts[:1])
    with pytest.raises(Refusal, match=r"unlike gpus \(a 0, b None\)"):
        probe_of([hosts[0], Host(host="b")])

    def take(**environment: str) -> None:
        job = replace(probe_of(hosts, "float32"), environment=environment, name=f"probe-{len(environment)}")
        start(job, HASH, parts, [])
        links.take(job.name, parts, file)

    take()
    found = links.read_links(file)
    assert found and found.hosts == ["a", "b"] and found.gbit[1][0] == 4.0 and found.delay_ms[0][1] == 20.0
    assert not any((tmp_path / name / "runs/probe-0").exists() for name in "ab")
    with pytest.raises(Refusal, match="the run probe-1, a probe, is failed on b; its log there says why"):
        take(NCCL_FAILS="1")
    with pytest.raises(Refusal, match="a sends no cluster file"):
        take(NCCL_FAILS="2", NCCL_BYTES="30")
    assert links.read_links(file) == found


@linux
def test_runs_below_a_folder_that_a_host_s_watch_names_are_shown_and_can_only_be_read(look, tmp_path):
    write_run(tmp_path / "theirs/deep/one", steps=3)
    nodes = look()
    library = Library(tmp_path / "here", [], nodes)
    library.refresh()
    (entry,) = library.entries()
    shown = entry.page.name, entry.page.node, entry.page.step, entry.page.is_own, entry.row.run
    assert shown == ("deep/one", "b", 3, False, "@0/deep/one")
    assert library.page(entry.page.id).checkpoints == ["step-20"]
    with pytest.raises(ValidationError, match="run"):  # no message stops or deletes it
        entry.member.node.ask(messages.Stop, run=entry.row.run)


@linux
def test_a_run_on_a_shared_disk_is_deleted_once_and_forgotten_and_none_is_while_a_node_runs_it(look, tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").symlink_to(tmp_path / "a")
    nodes, engine = look(), open_database(tmp_path / "here")
    kept, audit, ada = Kept(engine), Audit(engine), Person("ada", "admin")
    library = Library(tmp_path / "here", [], nodes, kept.tags)
    actions = Actions(tmp_path / "here", library, nodes, People(engine), audit, kept)
    start(Job("shared", "lines = 100000", needs_disk=True), HASH, parts_on(nodes, tmp_path), [])
    id = library.id_of("a", str(tmp_path / "a/runs/shared"))
    assert actions.tag(ada, id, TagRun(add=["good"])).tags == ["good"]
    with pytest.raises(Refusal, match="run = shared still runs on a"):
        actions.delete(ada, id)
    actions.stop(ada, id, 0)
    assert (actions.delete(ada, id).freed_bytes or 0) > 0 and kept.tags() == {}
    assert not (tmp_path / "a/runs/shared").exists()
    outcomes = [row.outcome[:7] for row in audit.newest(9) if row.what == "delete"]
    assert outcomes == ["done", "refused"]


def test_a_node_that_goes_is_known_at_once_and_all_are_closed_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(client, "_SECONDS_TO_CLOSE", 1.5)
    node = f"cd {ROOT} && echo $$ >>{tmp_path}/pids && exec {sys.executable} -m torchtitan node --home {tmp_path}/there"
    (tmp_path / "ssh").write_text(f"#!/bin/sh\n[ -e {tmp_path}/cut ] && exec sleep 300\n{node}\n")
    (tmp_path / "ssh").chmod(0o755)
    (tmp_path / "nodes.toml").write_text("".join(f'[[node]]\nhost = "{name}"\n' for name in "abcd"))
    nodes = Nodes(tmp_path / "here", tmp_path / "nodes.toml", [str(tmp_path / "ssh")], "unused")
    nodes.ask_soon()
    nodes.start()
    members = [nodes.find(name) for name in "abcd"]
    try:
        wait_for(lambda: nodes.ask_soon() or not any(member.trouble for member in members))
        (tmp_path / "cut").touch()
        for end in (signal.SIGSTOP, signal.SIGKILL):  # so each is asked for its runs, and has not answered
            for pid in (tmp_path / "pids").read_text().split():
                os.kill(int(pid), end)
            time.sleep(0.5)
        wait_for(lambda: all(member.trouble for member in members))
        time.sleep(1)  # in which each connects again
        begin = time.monotonic()
    finally:
        nodes.close()
    assert time.monotonic() - begin < 4 * 1.5  # as one after the other would take
