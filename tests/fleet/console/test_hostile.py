"""Hostile run folders and nodes; `python -m tests.fleet.console.hostile --seconds 600` makes more of them."""

import subprocess
import sys

import pytest

from tests.fleet.console.served import ROOT


@pytest.mark.parametrize("seconds", [2, pytest.param(60, marks=pytest.mark.all)])
def test_no_run_folder_and_no_node_harms_who_looks_or_what_is_shown_of_others(seconds: int) -> None:
    command = [sys.executable, "-m", "tests.fleet.console.hostile", "--seconds", str(seconds), "--seed", "3"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
