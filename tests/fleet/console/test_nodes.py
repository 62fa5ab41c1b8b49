"""Two further machines: real sshd, in network namespaces where the system gives them. One of them is bare at first.

Then a run on both, in a browser: followed over a killed console, and stopped.
"""

import re
import shlex
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.fleet.console.served import Served, served, wait_for
from tests.fleet.console.test_api import SHORT
from tests.fleet.console.test_browser import browser  # noqa: F401  (a fixture)
from tests.fleet.node.test_ssh import Hosts, hosts, pytestmark  # noqa: F401  (fixture and marks)

LONG = SHORT.replace("steps = 2\n", "steps = 100000\n").replace("log_freq = 10", "log_freq = 1")
LONG = LONG.replace("[training]", "[training]\nglobal_batch_size = 4").replace(
    "[checkpoint]\nenable = true", "[checkpoint]\nenable = false"
)
BOTH = ["keyed", "bare"]


def options(hosts: Hosts) -> list[str]:  # noqa: F811
    reached = ["--nodes", str(hosts.folder / "nodes.toml"), "--ssh", shlex.join([*hosts.enter, *hosts.ssh.split()])]
    return [*reached, "--node-home", str(hosts.folder / "bare")]


@pytest.fixture(scope="module")
def console(hosts: Hosts) -> Iterator[Served]:  # noqa: F811
    address = "" if hosts.holder else 'address = "127.0.0.1"\n'
    nodes = "".join(f'[[node]]\nhost = "{name}"\ngpus = 0\n{address}' for name in BOTH)
    (hosts.folder / "nodes.toml").write_text(nodes)
    with served(hosts.folder / "console", hosts.folder / "none", *options(hosts)) as running:
        wait_for(lambda: node(running, "keyed")["is_connected"] and node(running, "bare")["is_bare"])
        assert running.client.post("/api/nodes/bare/install", timeout=200).status_code == 200
        wait_for(lambda: node(running, "bare")["is_connected"])
        yield running


def node(console: Served, name: str) -> dict[str, Any]:
    return next(one for one in console.client.get("/api/nodes").json() if one["name"] == name)


def parts(console: Served, name: str) -> list[dict[str, Any]]:
    return [run for run in console.client.get("/api/runs").json() if run["name"] == name]


def are_over(console: Served, name: str) -> Callable[[], bool]:
    return lambda: bool(parts(console, name)) and all(run["state"] != "running" for run in parts(console, name))


def test_other_machines_appear_and_are_set_up_and_what_needs_a_shared_disk_is_refused(console):
    assert node(console, "keyed")["report"]["cores"] >= 1 and not node(console, "keyed")["is_here"]
    wish = {"config": SHORT, "name": "shared", "nodes": BOTH}
    refused = console.client.post("/api/runs", json=wish, timeout=200)
    assert refused.status_code == 409 and "which bare does not share" in refused.json()["detail"]
    wait_for(are_over(console, "shared"))


def steps_in(text: str) -> list[int]:
    return [int(found) for found in re.findall(r"step +(\d+)/", text)]


def log_of(console: Served, id: str) -> str:
    text, piece = "", {"next": 0, "size": 1}
    while piece["next"] < piece["size"]:
        log = f"/api/runs/{id}/logs/node/0/output.log"
        piece = console.client.get(log, params={"position": piece["next"]}).json()
        text += piece["text"]
    return text


def test_a_run_on_two_machines_and_its_log_outlive_a_killed_console_and_a_stop_leaves_nothing(console, hosts, browser):  # noqa: F811
    call, tab = console.client, browser.new_context(base_url=console.address).new_page()
    tab.set_default_timeout(100_000)
    wish = {"config": LONG, "name": "story", "nodes": BOTH}
    id = call.post("/api/runs", json=wish, timeout=200).json()["id"]
    assert id in [run["id"] for run in parts(console, "story")]
    tab.goto(f"/run/{id}")

    def steps() -> list[int]:
        """Of the log, as the page shows it."""
        return steps_in(tab.locator(".log").inner_text())

    tab.locator("canvas").first.wait_for()
    tab.get_by_role("tab", name="Log").click()
    wait_for(lambda: len(steps()) > 2)
    before = steps()[-1]
    console.process.kill()
    tab.get_by_text("Connection lost").wait_for()
    with served(console.home, console.runs, *options(hosts), "--port", str(console.port)) as again:
        tab.get_by_text("Connection lost").wait_for(state="hidden")
        tab.get_by_role("tab", name="Log").click()
        wait_for(lambda: steps() and steps()[-1] > before)
        tab.get_by_role("button", name="Stop").click()
        tab.get_by_role("dialog").get_by_role("button", name="Stop").click()
        tab.get_by_text("stopped", exact=True).wait_for()
        both = [(0, "keyed", 2, "stopped"), (1, "bare", 2, "stopped")]  # the page shows one node's part
        wait_for(
            lambda: both == sorted((r["rank"], r["node"], r["nodes"], r["state"]) for r in parts(console, "story"))
        )
        hosts.wait_until_nothing_runs()
        every = steps_in(log_of(again, id))
        assert every == list(range(1, len(every) + 1)) and every[-1] > before
        wait_for(lambda: steps()[-1] == every[-1])
        assert steps() == every[-len(steps()) :]
        assert [record["step"] for record in call.get(f"/api/runs/{id}/metrics").json()["records"]] == every
        assert "llama3" in call.get(f"/api/runs/{id}/files/config.toml").text
        assert call.get(f"/api/runs/{id}/files/..%2f..%2f..%2fmine").status_code in (404, 409)
        assert call.post(f"/api/runs/{id}/delete").json()["freed_bytes"] > 0
        assert not any((hosts.folder / folder / "runs/story").exists() for folder in BOTH)
    tab.context.close()
