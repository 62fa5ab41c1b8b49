"""Runs that are handed to a scheduler. The stand-in for sbatch has the script's own command checked on this machine."""

import os
from pathlib import Path

import pytest

from tests.fleet.console.served import TOML, served, verb, wait_for, write_run
from tests.fleet.console.test_api import SHORT
from titan_fleet.console.answers import SubmitRun
from titan_fleet.console.verbs import submissions
from torchtitan.refusal import Refusal

SBATCH = """#!/bin/sh
while [ "$1" != multinode_trainer.slurm ]; do shift; done
shift
PRINT_ONLY=1 NGPU=1 ./run_llama_train.sh --checkpoint.enable "$@" >"$0.log" 2>&1 || exit
echo "$@" >"$0.words"
echo "Submitted batch job 7"
"""


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/sbatch").write_text(SBATCH)
    (tmp_path / "bin/sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin{os.pathsep}{os.environ['PATH']}")


def test_a_run_is_submitted_by_the_script_that_was_shown_and_appears_among_the_runs(tmp_path: Path, client) -> None:
    wish = {"site": "slurm", "config": SHORT, "name": "sent", "gpus": 0}
    with served(tmp_path / "home", tmp_path / "runs") as console:
        call = console.client
        assert "slurm" in call.get("/api/sites").json()
        shown = call.post("/api/submissions", json=wish | {"only_print": True}, timeout=100)
        assert shown.status_code == 200, shown.text
        assert list((tmp_path / "runs/.submitted").iterdir()) == []  # what a queued job reads stays as it is
        (tmp_path / "sent.toml").write_text(SHORT)
        words = ["--config", f"{tmp_path}/sent.toml", "--gpus", "0", "--name", "sent", "--print"]
        printed = verb("launch", "slurm", *words, "--", "--job.dump_folder", f"{tmp_path}/runs/sent")
        printed = printed.replace(f"{tmp_path}/sent.toml", f"{tmp_path}/runs/.submitted/sent.toml")
        assert shown.json()["text"] == printed.strip() and "sbatch" in printed
        assert not (tmp_path / "runs/sent").exists() and call.get("/api/audit").json() == []
        assert call.post("/api/submissions", json=wish, timeout=100).json()["text"] == "Submitted batch job 7"
        assert f"--job.dump_folder {tmp_path}/runs/sent" in (tmp_path / "bin/sbatch.words").read_text()
        write_run(tmp_path / "runs/sent", steps=100)  # as the job will
        wait_for(lambda: [(run["name"], run["state"]) for run in call.get("/api/runs").json()] == [("sent", "ended")])
        assert [(row["what"], row["target"]) for row in call.get("/api/audit").json()] == [("submit", "sent to slurm")]
        again = call.post("/api/submissions", json=wish)
        assert again.status_code == 409 and "exists already; choose another name" in again.json()["detail"]
        for _ in range(2):  # a job that no scheduler took leaves nothing
            refused = call.post("/api/submissions", json=wish | {"name": "Sent"}, timeout=100)
            assert refused.status_code == 409 and "--name Sent is not a valid name" in refused.json()["detail"]
        (tmp_path / "runs/.submitted/waits.toml").write_text("")
        refused = call.post("/api/submissions", json=wish | {"name": "waits"}, timeout=100)
        assert refused.status_code == 409 and "waits was submitted before; choose another" in refused.json()["detail"]


def test_a_site_without_its_client_or_whose_client_hangs_is_refused(
    tmp_path: Path, client, monkeypatch: pytest.MonkeyPatch
) -> None:
    wish = SubmitRun(site="slurm", config=TOML, name="sent")
    with monkeypatch.context() as patch, pytest.raises(Refusal, match="`launch` gives no answer within 0.001 s"):
        patch.setattr(submissions, "_SECONDS", 0.001)
        submissions.submit(tmp_path / "runs", wish)
    monkeypatch.setenv("PATH", "/nowhere")
    assert submissions.sites() == []
    with pytest.raises(Refusal, match="site = slurm needs sbatch on the console's machine"):
        submissions.submit(tmp_path, wish)
