"""The live API under made requests: whatever is sent, it answers as /openapi.json says, and fails never.

python -m tests.fleet.console.test_api_fuzz --seconds 600 --seed 1     ours, by hand; the suite does a few seconds of it
st run http://127.0.0.1:8400/openapi.json --max-time 600 --rate-limit 35/s     schemathesis, by hand; it may start a run
"""

import argparse
import contextlib
import json
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import tomli
import tomli_w

from tests.fleet.console.served import TOML, Served, served, write_run
from tests.house.fuzzing import damage_json, damage_text

SECONDS = [2, pytest.param(60, marks=pytest.mark.all)]
MOST_GROWTH = 100 * 2**20  # bytes of the console's memory
# A run that is there; a status that schemathesis does not expect where a body is too large; and it does not know that
# POST /designs/NAME/delete, which it sends between others, deletes, so it misses what it saved (test_kept.py looks).
KNOWN = """
[parameters]
"path.id" = "{id}"
[checks]
negative_data_rejection.expected-statuses = ["4xx"]
ensure_resource_availability.enabled = false
[phases.stateful.checks]
positive_data_acceptance.enabled = false  # it follows links with values that their pattern forbids
"""
PATHS = "/login /run/{} /api/{} /api/runs/{} /api/runs/{}/metrics?after={} /api/runs/{}/files/{} /api/runs/{}/logs/{}"
PATHS += " /api/runs?tag={} /api/runs/{}/logs/train.log?search={} /api/audit?search={}&number={} /api/designs/{}"
# No request of these starts a process: there is no such node, machine, checkpoint or scheduler.
WISHES: dict[str, dict[str, Any]] = {
    "/api/check": {"config": TOML},
    "/api/plan": {"config": TOML, "machines": "nowhere", "nodes": ["nowhere"]},
    "/api/submissions": {"site": "nowhere", "config": TOML, "name": "x", "nodes": 1, "gpus": 0, "mounts": ["a:b"]},
    "/api/designs": {"name": "x", "config": TOML, "nodes": ["a"], "machines": "", "version": 0},
    "/api/designs/x/delete": {"version": 1},
    "/api/runs/{id}/tags": {"add": ["a"], "remove": ["b"]},
    "/api/runs/{id}/stop": {"seconds": 5},
    "/api/runs/{id}/generate": {"checkpoint": "step-99", "prompt": "a", "tokens": 3, "temperature": 0.5},
}
ODD = ["%00", "%ff", "%ed%a0%80", "%0a", "%1b%5d", "%2e%2e", "%2F", "%25", "%F0%9F%92%A9", "..", "~", "9" * 400, "NaN"]
LITERALS = ["NaN", "-Infinity", "1e999", "9" * 5000, '"\\ud800"', '"\\u0000"', "[" * 60_000, '{"a":' * 30_000]


def made(chance: random.Random, id: str) -> tuple[str, str, bytes]:
    """Method, address and body of one request."""
    if chance.random() < 0.4:
        path = chance.choice(PATHS.split())
        odd = [chance.choice([id, chance.choice(ODD), quote(chance.randbytes(3))]) for _ in range(2)]
        return chance.choice(["GET", "GET", "POST", "HEAD"]), path.format(*odd), b""
    if chance.random() < 0.1:
        return (
            "POST",
            "/login",
            b"&".join(chance.choice([b"token=%00", b"a", b"\xff"]) for _ in range(chance.randrange(9))),
        )
    path, wish = chance.choice([*WISHES.items()])
    if "config" in wish and chance.random() < 0.6:
        wish = wish | {"config": damaged_toml(chance)}
    elif chance.random() < 0.7:
        wish = damage_json(wish, chance)
    body = json.dumps(wish)
    if isinstance(wish, dict) and wish and chance.random() < 0.3:
        body = json.dumps(wish | {chance.choice([*wish]): "HERE"}).replace('"HERE"', chance.choice(LITERALS))
    data = body.encode()
    return "POST", path.format(id=id), damage_text(data, chance) if chance.random() < 0.2 else data


def damaged_toml(chance: random.Random) -> str:
    if chance.random() < 0.3:
        number = chance.choice(["9" * 5000, "0x" + "f" * 5000, "nan", "[" * 300 + "]" * 300, '"\\u0000"', "1979-05-27"])
        return f"[training]\nsteps = {number}\n"
    if chance.random() < 0.3:
        return damage_text(TOML.encode(), chance).decode(errors="replace")
    try:
        return tomli_w.dumps(damage_json(tomli.loads(TOML), chance))
    except (TypeError, AttributeError):  # a value that TOML cannot say
        return ".".join("a" * 500) + " = 1"


def memory(process: int) -> int:
    pages = Path(f"/proc/{process}/statm")
    return int(pages.read_text().split()[1]) * 4096 if pages.exists() else 0


def attack(console: Served, seconds: float, seed: int) -> Counter[int]:
    """How often each status came; an AssertionError shows the request that a person must not be able to make."""
    chance, seen, before = random.Random(seed), Counter[int](), memory(console.process.pid)
    id = console.client.get("/api/runs").json()[0]["id"]
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        method, path, body = made(chance, id)
        line = HTTPConnection("127.0.0.1", console.port, timeout=20)
        line.request(method, path, body, {"Content-Type": "application/json"})
        answer = line.getresponse()
        said = answer.read()
        line.close()
        seen[answer.status] += 1
        assert answer.status < 500, (seed, method, path, body[:2000], said[:500])
        if path.startswith("/api/") and method != "HEAD" and b"json" in answer.headers["content-type"].encode():
            json.loads(said)
        if answer.status == 429:
            time.sleep(0.5)
    assert console.client.get("/api/runs").json()[0]["id"] == id
    assert memory(console.process.pid) < before + MOST_GROWTH
    return seen


@contextlib.contextmanager
def attacked(folder: Path) -> Iterator[tuple[Served, list[str]]]:
    """A console, and the lines that it prints."""
    write_run(folder / "runs/one", steps=3)
    with served(folder / "home", folder / "runs") as console:
        said: list[str] = []
        assert console.process.stdout
        lines = console.process.stdout
        threading.Thread(target=lambda: said.extend(lines), daemon=True).start()  # a full pipe would halt the console
        yield console, said
        assert "Traceback" not in "".join(said), "".join(said)[-3000:]


@pytest.fixture(scope="module")
def console(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, list[str]]]:
    with attacked(tmp_path_factory.mktemp("attacked")) as running:
        yield running


@pytest.mark.parametrize("seconds", SECONDS)
def test_no_made_request_ends_in_a_stack_or_harms_who_asks_next(console, seconds: int) -> None:
    running, said = console
    seen = attack(running, seconds, seed=5)
    assert {200, 404, 409, 422} <= seen.keys() and sum(seen.values()) > 50, seen
    assert "Traceback" not in "".join(said), "".join(said)[-3000:]


@pytest.mark.parametrize("seconds", SECONDS)
@pytest.mark.timeout(300)
def test_no_request_makes_the_api_fail_or_answer_what_it_does_not_describe(
    console, tmp_path: Path, seconds: int
) -> None:
    pytest.importorskip("schemathesis", reason="schemathesis is not installed")
    id = console[0].client.get("/api/runs").json()[0]["id"]
    (tmp_path / "known.toml").write_text(KNOWN.format(id=id))
    schemathesis = [sys.executable, "-m", "schemathesis.cli", f"--config-file={tmp_path}/known.toml"]
    limits = [f"--max-time={seconds}", "--rate-limit=35/s", "--request-timeout=60", "--generation-database=none"]
    limits += ["--exclude-operation-id=start_api_runs_post"]  # an empty configuration trains
    command = [*schemathesis, "run", f"{console[0].address}/openapi.json", *limits, "--no-color"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0 and "Test cases:" in done.stdout, done.stdout[-5000:] + done.stderr[-2000:]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        with attacked(Path(temporary)) as (console_here, _):
            print(attack(console_here, args.seconds, args.seed))
