"""The short form of the drill: a run that is broken again and again ends as if nothing had happened."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from torchtitan.verbs.drill import Run

ROOT = Path(__file__).parents[2]
# Small sequences, a save every other step and a short timeout for a stopped rank keep this to seconds.
OPTIONS = """--job.config_file train_configs/debug_model.toml --training.steps 28 --training.seq_len 32
--training.local_batch_size 1 --training.global_batch_size 2 --metrics.log_freq 1 --metrics.no_enable_tensorboard
--validation.no_enable --checkpoint.interval 2 --checkpoint.keep_latest_k 4 --checkpoint.async_mode async
--comm.train_timeout_seconds 6""".split()
# A small disk that exists only for this process, so the drill may fill it.
IN_A_SMALL_DISK = 'mount -t tmpfs -o size=900m drill "$0" && exec "$@"'


@pytest.mark.timeout(300)
def test_a_run_survives_every_kind_of_fault(tmp_path: Path) -> None:
    words = f"{sys.executable} -m torchtitan drill --faults 3 --seed 1165 --minutes 4 --out {tmp_path}/drill --"
    command = words.split()  # this seed draws: killed in a write, a full disk, a flipped bit; each does harm
    apart = ["unshare", "--mount", *(["--user", "--map-root-user"] if os.geteuid() else [])]
    trial = [*apart, "mount", "-t", "tmpfs", "trial", str(tmp_path)]
    if shutil.which("unshare") and subprocess.run(trial, capture_output=True).returncode == 0:
        command = [*apart, "bash", "-c", IN_A_SMALL_DISK, str(tmp_path), *command]
    done = subprocess.run(
        [*command, *OPTIONS],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "nothing was lost: all tensors are the same to the bit" in done.stdout
    assert done.stdout.count("\n| ") == 2 + 3  # the table of faults


def test_a_drill_that_ends_early_leaves_no_process_behind(tmp_path: Path) -> None:
    run = Run(tmp_path, 1, [], deadline=0.0)
    with (tmp_path / "run.log").open("ab") as run.log, subprocess.Popen(["sleep", "60"]) as run.process:
        with pytest.raises(ValueError, match="the drill took longer than --minutes; see the end of .*run.log"):
            run.wait_until(lambda: False)
        assert run.process.poll() == -signal.SIGKILL
