"""The report of a hang, on a run of this machine and of a node; tests/recipe/distributed/test_faults.py makes hangs."""

import shlex
import sys
from pathlib import Path

from tests.fleet.console.served import served, wait_for, write_run

REPORT = "no progress for 4 s at step 3: rank 1 lags (in no collective), others wait in all_reduce\n"


def test_a_hang_is_explained_with_who_waits_for_whom_and_each_ranks_stack(tmp_path: Path) -> None:
    write_run(tmp_path / "runs/run", steps=3), write_run(tmp_path / "runs/healthy", steps=3)
    (tmp_path / "runs/run/hang").mkdir()
    for name, text in (("report", REPORT), ("rank_0", "all_reduce\n"), ("rank_1", "  time.sleep(1000)\n")):
        (tmp_path / f"runs/run/hang/{name}.txt").write_text(text)
    # A node program that is reached by a command other than ssh, which leaves ssh's own words alone.
    program = f"exec {sys.executable} -m torchtitan node --home {tmp_path}/far --watch {tmp_path}/runs"
    (tmp_path / "nodes.toml").write_text('[[node]]\nhost = "far"\n')
    options = ["--nodes", str(tmp_path / "nodes.toml"), "--ssh", shlex.join(["sh", "-c", program])]
    with served(tmp_path / "home", tmp_path / "runs", *options) as console:
        client = console.client
        wait_for(lambda: sum(run["name"] == "run" for run in client.get("/api/runs").json()) == 2)
        runs = {(run["name"], run["node"]): run["id"] for run in client.get("/api/runs").json()}
        for node in ("this machine", "far"):
            found = client.get(f"/api/runs/{runs['run', node]}/hang").json()
            assert REPORT.strip() in found["report"]
            assert found["stacks"] == ["hang/rank_0.txt", "hang/rank_1.txt"] and not found["went_on"]
            stack = client.get(f"/api/runs/{runs['run', node]}/logs/hang/rank_1.txt").json()["text"]
            assert "time.sleep(1000)" in stack
            none = client.get(f"/api/runs/{runs['healthy', node]}/hang")
            assert none.status_code == 404 and "has waited in vain" in none.json()["detail"]
        (tmp_path / "runs/run/metrics.jsonl").touch()
        assert client.get(f"/api/runs/{runs['run', 'this machine']}/hang").json()["went_on"]
