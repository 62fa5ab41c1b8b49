"""Two further machines: real sshd, in network namespaces where the system gives them. One of them is bare."""

import os
import shlex
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.console.served import Served, served, wait_for
from tests.console.test_api import SHORT, generate_and_export
from tests.node.test_ssh import Hosts, hosts, pytestmark  # noqa: F401  (fixture and marks)


@pytest.fixture
def console(hosts: Hosts) -> Iterator[Served]:  # noqa: F811
    address = "" if hosts.holder else 'address = "127.0.0.1"\n'
    nodes = "".join(f'[[node]]\nhost = "{name}"\ngpus = 0\n{address}' for name in ("keyed", "bare"))
    (hosts.folder / "nodes.toml").write_text(nodes)
    options = ["--nodes", str(hosts.folder / "nodes.toml"), "--ssh", shlex.join([*hosts.enter, *hosts.ssh.split()])]
    options += ["--node-home", str(hosts.folder / "bare")]
    with served(hosts.folder / "console", hosts.folder / "none", *options) as running:
        yield running


def test_other_machines_appear_are_set_up_and_run_what_the_console_sends(console):
    call = console.client

    def node(name: str) -> dict[str, Any]:
        return next(one for one in call.get("/api/nodes").json() if one["name"] == name)

    def parts(name: str) -> list[dict[str, Any]]:
        return [run for run in call.get("/api/runs").json() if run["name"] == name]

    def are_over(name: str) -> Callable[[], bool]:
        return lambda: bool(parts(name)) and all(run["state"] != "running" for run in parts(name))

    wait_for(lambda: node("keyed")["is_connected"] and node("bare")["is_bare"])
    assert node("keyed")["report"]["cores"] >= 1 and not node("keyed")["is_here"]
    assert call.post("/api/nodes/bare/install", timeout=200).status_code == 200
    wait_for(lambda: node("bare")["is_connected"])

    wish = {"config": SHORT, "name": "shared", "nodes": ["keyed", "bare"]}
    refused = call.post("/api/runs", json=wish, timeout=200)
    assert refused.status_code == 409 and "which bare does not share" in refused.json()["detail"]
    assert are_over("shared")
    alone = SHORT.replace("[checkpoint]\nenable = true", "[checkpoint]\nenable = false")
    started = call.post("/api/runs", json=wish | {"config": alone, "name": "two"}, timeout=200)
    assert started.status_code == 201 and started.json()["id"] in [run["id"] for run in parts("two")]
    wait_for(are_over("two"))
    found = sorted((run["rank"], run["node"], run["nodes"], run["state"]) for run in parts("two"))
    assert found == [(0, "keyed", 2, "ended"), (1, "bare", 2, "ended")]

    id = next(run["id"] for run in parts("two") if run["rank"] == 0)
    assert call.get(f"/api/runs/{id}/metrics").json()["records"]
    assert "step 2/2" in call.get(f"/api/runs/{id}/logs/node/0/output.log").json()["text"]
    sent = call.get(f"/api/runs/{id}/files/config.toml")
    assert sent.status_code == 200 and "llama3" in sent.text
    assert call.get(f"/api/runs/{id}/files/..%2f..%2f..%2fmine").status_code in (404, 409)
    assert call.post(f"/api/runs/{id}/delete").json()["freed_bytes"] > 0
    wait_for(lambda: not parts("two"))
    assert not any(os.path.exists(console.home.parent / folder / "runs/two") for folder in ("keyed", "bare"))


@pytest.mark.timeout(600)
def test_a_checkpoint_of_another_machine_continues_a_text_there_and_is_exported(console):
    call = console.client
    wait_for(lambda: any(one["name"] == "keyed" and one["is_connected"] for one in call.get("/api/nodes").json()))
    wish = {"config": SHORT, "name": "kept", "nodes": ["keyed"]}
    assert call.post("/api/runs", json=wish, timeout=200).status_code == 201
    wait_for(lambda: [run["state"] for run in call.get("/api/runs").json()] == ["ended"], 300)
    assert generate_and_export(console, call.get("/api/runs").json()[0]["id"])
