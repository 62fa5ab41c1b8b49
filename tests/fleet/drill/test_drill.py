"""The short form of the drill: a run that is broken again and again ends as if nothing had happened."""

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import started
from titan_fleet.drill import verb
from titan_fleet.drill.faults import FAULTS
from titan_fleet.drill.places import ThisMachine
from titan_fleet.drill.run import BreakableRun
from torchtitan.__main__ import main

ROOT = Path(__file__).parents[3]
# A small disk that exists only for this process, so the drill may fill it.
IN_A_SMALL_DISK = 'mount -t tmpfs -o size=900m drill "$0" && exec "$@"'


def drill(tmp_path: Path, *words: str) -> str:
    """Drill on a small disk, where this kernel lets a user mount one."""
    command = [sys.executable, "-m", "torchtitan", "drill", "--minutes", "9", "--out", f"{tmp_path}/drill", *words]
    apart = ["unshare", "--mount", *(["--user", "--map-root-user"] if os.geteuid() else [])]
    trial = [*apart, "mount", "-t", "tmpfs", "trial", str(tmp_path)]
    if shutil.which("unshare") and subprocess.run(trial, capture_output=True).returncode == 0:
        command = [*apart, "bash", "-c", IN_A_SMALL_DISK, str(tmp_path), *started.IN_PLACE, *command[1:]]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = started.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.timeout(600)
def test_a_run_of_ones_own_that_saves_too_seldom_gets_an_interval_and_survives_two_faults_to_the_bit(
    tmp_path: Path,
) -> None:
    short = ["--training.steps", "24", "--validation.freq", "12", "--checkpoint.interval", "24"]
    short += ["--comm.train_timeout_seconds", "60"]  # beside other work a step may take 20 s
    said = drill(tmp_path, "--faults", "2", "--seed", "305", "--", *verb._SMALL, *short)
    assert "checkpoint.interval = 2, so that each fault has something to break" in said
    assert "nothing was lost: all tensors and records are the same to the bit" in said
    assert said.count("\n| ") == 2 + 2  # the table of faults


@pytest.mark.all
@pytest.mark.timeout(600)
def test_a_ride_survives_each_kind_of_fault_to_the_bit(tmp_path: Path) -> None:
    said = drill(tmp_path, "--on", "FSDP 2, async, disk", "--seed", "7")
    assert "nothing was lost: all tensors and records are the same to the bit" in said
    assert said.count("\n| ") >= 2 + 14  # the table of faults


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--on", "PP 3, sync, disk"], "--on 'PP 3, sync, disk' is no ride; use all, or one of: FSDP 2, sync, disk;"),
        (["--on", "all", "--", "--training.steps", "4"], "--on drills the small model of this verb; give it, or"),
    ],
)
def test_a_ride_that_is_unknown_or_beside_options_of_a_run_is_refused(
    tmp_path: Path, options: list[str], message: str
) -> None:
    with pytest.raises(SystemExit, match=re.escape(message)):
        main(["drill", "--out", str(tmp_path / "out"), *options])


def test_every_kind_of_fault_fits_a_ride() -> None:
    on_disk = [name for name, fault in FAULTS.items() if fault.fits(ThisMachine(), ROOT)]
    assert {"all checkpoints damaged", "the disk of the checkpoints away"} < {*on_disk} < FAULTS.keys()


def test_a_drill_that_ends_early_leaves_no_process_behind(tmp_path: Path) -> None:
    run = BreakableRun(tmp_path, 1, 10, [], 0.0, ThisMachine())
    with (tmp_path / "run.log").open("ab") as run.log, subprocess.Popen(["sleep", "60"]) as process:
        run.launchers = [process]
        with pytest.raises(ValueError, match="the drill took longer than --minutes; see the end of .*run.log"):
            run.wait_until(lambda: False)
        assert process.poll() == -signal.SIGKILL
