"""One rank raises, dies, stops or sleeps: the console reports it once, each rank writes its stacks, and all end."""

import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest

from tests import started
from tests.ports import free_port
from tests.tiny_runs import BASE, read_records

ROOT = Path(__file__).parents[3]
MODULE = ["-m", "tests.recipe.distributed.faulty_train"]
START_TO_END = 280  # beside other work the starts of Python take most of it
pytestmark = pytest.mark.timeout(300)
SECONDS = 60  # an ordinary end takes less than 10; the default timeout of a collective is 100


class Run:
    """Starts a run with a fault and waits for its end."""

    def __init__(
        self,
        folder: Path,
        fault: str,
        num_ranks: int,
        torchrun: bool,
        restarts: int = 0,
        **overrides: object,
    ) -> None:
        kind, self.faulty_rank, step = fault.split()
        self.folder, self.console = folder / "run", ""
        values = BASE | {"job.dump_folder": self.folder, "training.local_batch_size": 2}
        values |= {"training.global_batch_size": 2 * num_ranks} | {
            k.replace("__", "."): v for k, v in overrides.items()
        }
        options = [part for name, value in values.items() for part in (f"--{name}", str(value))]
        options += ["--checkpoint.enable"] if restarts or kind in ("preemption", "ctrl-c") or step == "save" else []
        port = str(free_port())
        environment = os.environ | {"FAULT": fault, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        environment |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"} if restarts else {}
        ranks: list[dict[str, str]] = [{}]
        command = [sys.executable, *MODULE, *options]
        if torchrun:
            launcher = f"--standalone --nproc_per_node {num_ranks} --max_restarts {restarts}".split()
            command = [sys.executable, "-m", "torchtitan.launch.ranks", *launcher, *MODULE, *options]
        else:
            shared = {"WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "localhost", "MASTER_PORT": port}
            ranks = [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(num_ranks)]
        with open(folder / "console", "w+") as console:
            common = {"cwd": ROOT, "stdout": console, "stderr": console, "start_new_session": True}
            processes = [started.Popen(command, env=environment | rank, **common) for rank in ranks]
            try:
                for rank, process in enumerate(processes):
                    if kind != "SIGSTOP" or str(rank) != self.faulty_rank:
                        process.wait(START_TO_END)
                ended = time.time()
            finally:
                for process in processes:
                    try:
                        os.killpg(process.pid, signal.SIGKILL)
                    except ProcessLookupError:
                        pass
                    process.wait()
        self.codes = [process.returncode for process in processes]
        self.console = (folder / "console").read_text()
        fault_at = re.search(r"fault at (\S+)", self.console)
        assert fault_at, self.console
        self.seconds = ended - float(fault_at[1])


def test_a_rank_that_sleeps_is_named_and_all_leave_their_stacks_and_end(tmp_path: Path) -> None:
    run = Run(tmp_path, "sleep 1 3", 3, torchrun=False, comm__train_timeout_seconds=4)
    assert run.seconds < SECONDS and all(run.codes)
    assert run.console.count("\n  rank 1 is process ") == 1, run.console
    message = run.console[run.console.index("no progress for") :]
    assert re.match(
        r"no progress for \d s at step 3: rank 1 lags \(in no collective\), others wait in all_reduce\n"
        r".*  rank 1 is process \d+ on \S+\n"
        r".*  rank 1: step 3, tests/recipe/distributed/faulty_train.py:\d+ \(step_with_a_fault\)\n"
        r".*  ranks 0, 2: step 3, in all_reduce, called from torchtitan/parallel/collectives.py:\d+ \(sum_over\)\n",
        message,
    ), message
    assert (run.folder / "hang/report.txt").read_text() in message
    stacks = [(run.folder / "hang" / f"rank_{rank}.txt").read_text() for rank in range(3)]
    assert "time.sleep(1000)" in stacks[1] and "thread loader" in stacks[1]
    assert "dist.all_reduce(tensor, group=group)" in stacks[0] and "dist.all_reduce" in stacks[2]
    assert "Timed out" not in run.console  # the errors of the other ranks would add nothing


def test_the_error_of_one_rank_is_the_only_one_that_is_shown(tmp_path: Path) -> None:
    """Rank 0 serves the store in which it writes why it ends."""
    run = Run(tmp_path, "raise 0 3", 2, torchrun=False)
    assert run.seconds < SECONDS and all(run.codes)
    errors = re.findall(r"\w+Error: .*", run.console)
    assert errors[0] == "OSError: the disk is gone", run.console
    assert all("the disk is gone" in error or error == "ChildFailedError: " for error in errors), run.console
    assert "onnection" not in run.console, run.console


def test_an_error_after_a_reported_pause_is_reported_as_it_is(tmp_path: Path) -> None:
    run = Run(tmp_path, "pause 1 6", 2, torchrun=False, comm__train_timeout_seconds=6)
    assert run.seconds < SECONDS and all(run.codes)
    assert run.console.count(": rank 1 lags (in no collective)") == 1, run.console  # a busy machine may pause, too
    assert "rank 1 failed first, at step 6" in run.console and "the disk is gone" in run.console, run.console


def test_a_rank_that_is_killed_is_named(tmp_path: Path) -> None:
    run = Run(tmp_path, "SIGKILL 1 3", 2, torchrun=False)
    assert run.seconds < SECONDS and all(run.codes)
    assert "rank 1 lags (no answer)" in run.console and "Traceback" not in run.console


def test_a_rank_that_is_stopped_gives_no_answer_and_is_named(tmp_path: Path) -> None:
    run = Run(tmp_path, "SIGSTOP 1 3", 2, torchrun=False, comm__train_timeout_seconds=4)
    assert run.seconds < SECONDS and all(run.codes)
    assert run.console.count("rank 1 lags (no answer), others wait in all_reduce") == 1, run.console
    assert sorted(path.name for path in (run.folder / "hang").iterdir()) == ["rank_0.txt", "report.txt"]


def test_a_rank_whose_machine_is_gone_during_a_save_is_named_and_keeps_no_other_waiting(tmp_path: Path) -> None:
    """A save may wait for a slow disk for an hour, so no timeout of a collective finds it."""
    run = Run(tmp_path, "SIGSTOP 1 save", 2, torchrun=False, comm__train_timeout_seconds=4, checkpoint__interval=2)
    assert run.seconds < SECONDS and run.codes[0]
    sign = r"rank 1 \(process \d+ on \S+\) gave no sign of life for 4 s, at step 2, in all_gather\w*, called from "
    assert len(re.findall(sign + "torchtitan/checkpoint/", run.console)) == 1, run.console


def test_torchrun_restarts_a_killed_rank_and_the_run_resumes(tmp_path: Path) -> None:
    run = Run(tmp_path, "SIGKILL 1 4", 2, torchrun=True, restarts=1, checkpoint__interval=2)
    assert run.codes == [0], run.console
    assert "resuming from step 2 in " in run.console
    assert [record["step"] for record in read_records(run.folder)] == list(range(1, 11))


@pytest.mark.parametrize("kind", ["preemption", "ctrl-c"])
def test_a_signal_to_torchrun_and_to_the_ranks_counts_once_and_the_run_is_saved(tmp_path: Path, kind: str) -> None:
    run = Run(tmp_path, f"{kind} 1 3", 2, torchrun=True)
    assert "the run saves and ends after this step" in run.console, run.console
    assert "the same command goes on from here" in run.console and "Traceback" not in run.console, run.console
    assert run.codes == [75]
    (step,) = (int(path.name[5:]) for path in (run.folder / "checkpoint").glob("step-*"))
    assert step in (3, 4), run.console


@pytest.mark.parametrize("shown", ["0", "5"])
def test_what_all_ranks_refuse_is_shown_once_and_without_torchruns_summary(tmp_path: Path, shown: str) -> None:
    launcher = f"--standalone --nproc_per_node 2 --local_ranks_filter={shown} --tee=3".split()
    command = [sys.executable, "-m", "torchtitan.launch.ranks", *launcher, "train.py", "--checkpoint.enable"]
    command += ["--checkpoint.initial_load_path", str(tmp_path / "nothing"), "--job.dump_folder", str(tmp_path / "run")]
    command += ["--job.config_file", "train_configs/debug_model.toml", "--training.local_batch_size", "4"]
    done = started.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 1 and done.stderr.count('nothing" is not there') == 1, done.stdout + done.stderr
    assert "ChildFailedError" not in done.stderr and "exitcode" not in done.stderr
