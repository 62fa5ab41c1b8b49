"""A run that was stopped goes on from its newest checkpoint to its end. Or a refusal says why.

That it ends as one that was never stopped is what tests/recipe/distributed/test_resume.py shows.
"""

import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from tests.fleet.console.served import Served, served, wait_for, write_run
from titan_fleet.console.database import TAGS, open_database
from titan_fleet.console.library import Library
from titan_fleet.console.nodes import Nodes
from titan_fleet.console.resume import plan_resume
from torchtitan.refusal import Refusal

STEPS = 300
LONG = f"""
[model]
name = "llama3"
flavor = "debugmodel"
n_layers = 1
dim = 64
n_heads = 2
n_kv_heads = 2
hf_assets_path = "./tests/assets/tokenizer"
[training]
dataset = "pydocs"
local_batch_size = 1
seq_len = 32
steps = {STEPS}
[optimizer]
lr = 3e-3
[lr_scheduler]
warmup_steps = 10
[checkpoint]
enable = true
interval = 20
[debug]
seed = 0
"""  # so small that a step takes milliseconds


@pytest.fixture
def console(tmp_path: Path) -> Iterator[Served]:
    write_run(tmp_path / "shown/one", steps=3)
    with served(tmp_path / "home", tmp_path / "shown") as running:
        yield running


def records(console: Served, id: str) -> dict[int, float]:
    found = console.client.get(f"/api/runs/{id}/metrics").json()["records"]
    return {record["step"]: record["loss"] for record in found}


@pytest.mark.timeout(600)  # two starts of torch
def test_a_killed_run_goes_on_from_its_newest_checkpoint_to_its_end(console):
    def resume() -> tuple[int, str]:
        answer = console.client.post(f"/api/runs/{cut}/resume", timeout=200)
        return answer.status_code, answer.json().get("detail", "")

    started = console.client.post("/api/runs", json={"config": LONG, "name": "cut"}, timeout=200)
    assert started.status_code == 201, started.text
    cut = started.json()["id"]
    with ThreadPoolExecutor(2) as pool:
        wait_for(lambda: max(records(console, cut), default=0) > 25)
        code, why = resume()
        assert code == 409 and "still runs on this machine; stop it first" in why
        assert console.client.post(f"/api/runs/{cut}/stop", json={"seconds": 0}).json()["state"] == "stopped"
        saved = console.client.get(f"/api/runs/{cut}").json()["checkpoints"]
        newest, last = int(saved[-1].removeprefix("step-")), max(records(console, cut))
        assert 20 <= newest <= last < STEPS
        job = console.home / "runs/cut/node/0/job.toml"
        job.write_text(LONG.replace("lr = 3e-3", "lr = 4e-3"))
        code, why = resume()
        assert code == 409 and "began with another value of optimizer.lr" in why
        job.write_text(LONG)
        answers = sorted(pool.map(lambda _: resume(), range(2)))
    assert [code for code, _ in answers] == [201, 409] and "still runs" in answers[1][1]
    wait_for(lambda: console.client.get(f"/api/runs/{cut}").json()["run"]["state"] == "ended", 200)
    log = (console.home / "runs/cut/node/0/output.log").read_text()
    assert 0 <= log.find("starting at step 0: ") < log.find(f"resuming from step {newest} in ")  # one log
    assert sorted(records(console, cut)) == [1, *range(10, STEPS + 1, 10)]
    assert "did all its steps" in resume()[1]
    done = [(row["what"], row["outcome"][:9]) for row in console.client.get("/api/audit").json()]
    assert ("resume", "done") in done and ("resume", "refused: ") in done
    assert console.client.post(f"/api/runs/{cut}/tags", json={"add": ["gone"]}).json()["tags"] == ["gone"]
    assert console.client.post(f"/api/runs/{cut}/delete").status_code == 200
    with open_database(console.home).connect() as connection:
        assert connection.execute(select(TAGS)).all() == []  # a later run of this name has none
    other = console.client.get("/api/runs").json()[-1]["id"]
    refused = console.client.post(f"/api/runs/{other}/resume")
    assert refused.status_code == 409 and "was not started by a node program" in refused.json()["detail"]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"nodes": 2}, "ran on 2 nodes, and only this machine show it"),
        ({"code": "code/main"}, "ran main, which no console sent"),
        ({"config.toml": None}, "ended before it began to train"),
        ({"checkpoint": None}, "has no complete checkpoint"),
        ({"job.toml": LONG.replace("interval = 20", "load_step = 4")}, "checkpoint.load_step = 4"),
        ({"job.toml": LONG.replace("[checkpoint]\nenable = true", "[checkpoint]\nenable = false")}, "enable = false"),
    ],
)
def test_a_run_that_cannot_go_on_is_refused_with_the_reason(tmp_path, changes: dict[str, Any], why: str):
    folder = tmp_path / "runs/one"
    part = folder / "node/0"
    part.mkdir(parents=True)
    job = {"host": socket.gethostname(), "code": "code/" + "0" * 64, "rank": 0, "nodes": 1, "started": 1.0}
    (part / "job.json").write_text(json.dumps(job | changes))
    (part / "end.json").write_text(json.dumps({"state": "failed", "ended": 1.0, "exit_code": 1}))
    text = changes.get("job.toml", LONG)
    (part / "job.toml").write_text(text)
    if "config.toml" not in changes:
        (folder / "config.toml").write_text(text)
    if "checkpoint" not in changes:
        (folder / "checkpoint/step-4").mkdir(parents=True)
        (folder / "checkpoint/step-4/manifest.json").write_text("{}")
    library = Library(tmp_path, [], Nodes(tmp_path, None, ["ssh"], "home"))
    library.refresh()
    (run,) = library.runs()
    with pytest.raises(Refusal, match=why):
        plan_resume([library.find(run.id)])
