"""The command with which the documentation shows a swarm, made short."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SHORT = "--training.seq_len 32 --validation.steps 1 --lr_scheduler.warmup_steps 1"
NAMES = {"the swarm": "loss_swarm", "one run": "loss_single", "one site alone": "loss_alone"}


@pytest.mark.timeout(300)  # it takes as many cores as there are, and others may use them
def test_the_command_of_the_documentation_trains_a_swarm_beside_one_run_and_one_site_alone(tmp_path: Path) -> None:
    shown = re.search(r"`\.venv/bin/python (-m torchtitan swarm try [^`]*)`", (ROOT / "docs/README.md").read_text())
    assert shown
    words = [*shlex.split(shown[1]), *f"--sites 2 --steps 4 --every 2 --out {tmp_path}/swarm -- {SHORT}".split()]
    command, env = [sys.executable, *words], os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads((tmp_path / "swarm/result.json").read_text())
    assert result["anchors_equal"] and result["sites"] == 2 and result["bytes_up"] < result["bytes_up_of_gradients"]
    beside = result["loss_swarm"] / result["loss_single"] - 1
    assert f"their loss is {beside:+.1%} beside that run's" in done.stdout
    drawn = (tmp_path / "swarm/loss.svg").read_text()
    assert all(f"{name} {result[key]:.3f}</text>" in drawn for name, key in NAMES.items())
