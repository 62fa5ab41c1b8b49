"""The live API under schemathesis: whatever is sent, it answers as /openapi.json says, and fails never.

Ten minutes of it, by hand: st run http://127.0.0.1:8400/openapi.json --max-time 600 --rate-limit 35/s
It may start a run then, for an empty configuration is one.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.console.served import served, write_run

pytest.importorskip("schemathesis", reason="schemathesis is not installed")
SECONDS = 10
# A run that is there; a status that schemathesis does not expect where a body is too large; and it does not know that
# POST /designs/NAME/delete, which it sends between others, deletes, so it misses what it saved (test_kept.py looks).
KNOWN = """
[parameters]
"path.id" = "{id}"
[checks]
negative_data_rejection.expected-statuses = ["4xx"]
ensure_resource_availability.enabled = false
"""


def test_no_request_makes_the_api_fail_or_answer_what_it_does_not_describe(tmp_path: Path) -> None:
    write_run(tmp_path / "runs/one", steps=3)
    with served(tmp_path / "home", tmp_path / "runs") as console:
        id = console.client.get("/api/runs").json()[0]["id"]
        (tmp_path / "known.toml").write_text(KNOWN.format(id=id))
        schemathesis = [sys.executable, "-m", "schemathesis.cli", f"--config-file={tmp_path}/known.toml"]
        limits = [f"--max-time={SECONDS}", "--rate-limit=35/s", "--request-timeout=60", "--generation-database=none"]
        limits += ["--exclude-operation-id=start_api_runs_post"]  # an empty configuration trains
        command = [*schemathesis, "run", f"{console.address}/openapi.json", *limits, "--no-color"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0 and "Test cases:" in done.stdout, done.stdout[-5000:] + done.stderr[-2000:]
