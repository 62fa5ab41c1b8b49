"""Runs outlive the program that started them, are found again, and end without leaving a process."""

import base64
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.fleet.node.machines import CODE, HASH, ROOT, Program, processes_of, wait_until_nothing_runs
from titan_fleet.node import jobs, processes
from titan_fleet.node.archives import Archives
from titan_fleet.node.folders import Folders
from titan_fleet.node.messages import Start
from torchtitan.refusal import Refusal

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="runs are started on Linux alone")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    archive = base64.b64encode(CODE).decode()
    assert Archives(tmp_path / "code", []).put(HASH, 0, archive, is_last=True)
    return tmp_path


def follow(program: Program, run: str, into: bytearray, until: int | None = None) -> None:
    """Take bytes in order until the end of the log, or until so many."""
    while True:
        answer = program.ask(do="follow", run=run, path="node/0/output.log", position=len(into))
        assert answer["kind"] == "follow", answer
        into += base64.b64decode(answer["data"])
        if answer["is_end"] or (until is not None and len(into) >= until):
            return
        time.sleep(0.02)


def test_a_run_survives_its_program_and_no_line_is_lost_or_doubled(home: Path) -> None:
    log, first = bytearray(), Program(home)
    assert first.start("counts", "pause lines = 1000")["log"] == "node/0/output.log"
    follow(first, "counts", log, until=100)
    first.process.kill()
    first.process.wait()
    second = Program(home)
    assert second.row("counts")["state"] == "running"
    (home / "runs/counts/node/0/job.toml.go").touch()
    follow(second, "counts", log)
    assert log.decode().splitlines() == [f"line {number}" for number in range(1000)]
    row = second.row("counts")
    assert (row["state"], row["exit_code"]) == ("ended", 0)
    second.close()
    wait_until_nothing_runs(home)


def test_stopping_also_ends_what_has_a_session_and_an_environment_of_its_own(home: Path) -> None:
    program = Program(home)
    program.start("deaf", "session lines = 100000")
    while len(processes_of(home)) < 5:
        time.sleep(0.05)
    assert "still runs" in program.ask(do="delete", run="deaf")["why"]
    begin = time.monotonic()
    assert program.ask(do="stop", run="deaf", seconds=60)["state"] == "stopped"
    assert time.monotonic() - begin < 50 and processes_of(home) == {}  # Python ends on the signal at once
    assert program.ask(do="stop", run="deaf")["state"] == "stopped"
    size = program.ask(do="delete", run="deaf")["freed_bytes"]
    assert size > 0 and list((home / "runs").iterdir()) == []
    program.close()


def test_a_keeper_that_is_killed_takes_its_run_along_and_the_run_counts_as_lost(home: Path) -> None:
    program = Program(home)
    program.start("orphaned", "session lines = 100000")
    part = home / "runs/orphaned/node/0"
    while b"line" not in (part / "output.log").read_bytes():  # by then it has started all that it starts
        time.sleep(0.05)
    os.kill(json.loads((part / "keeper.json").read_text())["pid"], 9)
    program.wait("orphaned", "lost")
    follow(program, "orphaned", bytearray())  # it ends, too
    program.ask(do="stop", run="orphaned", seconds=5)
    assert program.row("orphaned")["state"] == "stopped"
    left = processes_of(home)  # those that kept neither the mark nor a parent, now that their keeper is dead
    for pid in left:
        os.kill(pid, 9)
    assert len(left) == 2 and all("SIG_IGN" in line for line in left.values())
    program.close()


def test_a_reused_pid_is_not_taken_for_a_run(home: Path) -> None:
    program = Program(home)
    program.start("old")
    program.wait("old", "ended")
    part = home / "runs/old/node/0"
    (part / "end.json").unlink()
    mine: dict[str, Any] = processes.identity(os.getpid())
    (part / "keeper.json").write_text(json.dumps(mine))
    assert program.row("old")["state"] == "running"
    for changed in ({"start": mine["start"] - 1}, {"boot": "another"}):
        (part / "keeper.json").write_text(json.dumps(mine | changed))
        assert program.row("old")["state"] == "lost"
    assert program.ask(do="stop", run="old", seconds=0)["state"] == "stopped"  # and this process was left alone
    (part / "job.json").write_text(json.dumps(json.loads((part / "job.json").read_text()) | {"host": "another"}))
    (part / "end.json").unlink()
    assert program.ask(do="runs")["runs"] == []  # its own machine shows it
    end = (part / "output.log").stat().st_size
    followed = program.ask(do="follow", run="old", path="node/0/output.log", position=end)
    assert followed["data"] == "" and not followed["is_end"]  # it may grow on the shared disk
    assert "still runs" in program.ask(do="delete", run="old")["why"]
    assert "ran on another machine" in program.start("old", again=True)["why"]
    program.close()


def test_a_run_that_is_over_goes_on_in_its_folder_when_asked(home: Path) -> None:
    program = Program(home)
    program.start("twice", "lines = 2")
    program.wait("twice", "ended")
    assert program.start("twice", "lines = 1", again=True)["kind"] == "start"
    program.wait("twice", "ended")
    log = bytearray()
    follow(program, "twice", log)
    assert log.decode().split("\n") == ["line 0", "line 1", "line 0", ""]
    (home / "runs/twice/node/0/output.log").write_text("")
    followed = program.ask(do="follow", run="twice", path="node/0/output.log", position=5)
    assert "follow it from 0" in followed["why"]
    (home / "runs/link").symlink_to(home / "runs/twice")
    assert "is a link" in program.start("link", again=True)["why"]
    program.close()


def test_a_run_that_goes_on_has_the_variables_and_ranks_of_its_start_but_no_secret_is_kept(home: Path) -> None:
    program, record = Program(home, "--env", "HF_TOKEN"), home / "runs/kept/node/0/job.json"
    given = {"NCCL_DEBUG": "INFO", "HF_TOKEN": "secret", "CUDA_VISIBLE_DEVICES": ""}
    program.start("kept", "variables, lines = 0", environment=given, ranks_here=2)
    program.wait("kept", "ended")
    assert "secret" not in record.read_text() and record.stat().st_mode & 0o777 == 0o600
    for again, ranks in ({}, 2), ({"environment": {"NCCL_DEBUG": "WARN"}, "ranks_here": 3}, 3):
        assert program.start("kept", "variables, lines = 0", again=True, **again)["kind"] == "start"
        program.wait("kept", "ended")
        assert json.loads(record.read_text())["ranks_here"] == ranks
    log = (home / "runs/kept/node/0/output.log").read_text().splitlines()
    assert [line.split()[:2] for line in log] == [["NCCL_DEBUG=INFO", "NGPU=2"]] * 2 + [["NCCL_DEBUG=WARN", "NGPU=3"]]
    assert json.loads(record.read_text())["environment"] == {"NCCL_DEBUG": "WARN"}  # and not that it was on the CPU
    program.close()


STOPPED_AT_ITS_END = """
import pathlib, sys, time
from titan_fleet.node import keeper
keeper.processes.read_record = lambda file: time.sleep(0.5) or {"seconds": 60}
print(keeper._keep(pathlib.Path(), {"command": [sys.executable, "-c", ""], "code": ".", "mark": "none"}))
"""


def test_a_keeper_sees_the_end_of_a_run_that_is_stopped_at_that_moment() -> None:
    done = subprocess.run([sys.executable, "-c", STOPPED_AT_ITS_END], cwd=ROOT, timeout=30, stdout=subprocess.PIPE)
    assert done.stdout == b"(0, True)\n"


def test_a_stop_during_the_start_is_kept(home: Path) -> None:
    program = Program(home)
    asked = program.send(do="start", run="early", config="lines = 100000", code=HASH)
    while not (home / "runs/early/node/0/job.json").exists():
        time.sleep(0.001)
    stop = program.send(do="stop", run="early", seconds=5)
    answers = {answer["id"]: answer for answer in (program.read(), program.read())}
    assert answers[asked]["kind"] == "start" and answers[stop]["state"] == "stopped"
    assert processes_of(home) == {}
    program.close()


def test_a_stop_that_may_wait_for_long_does_not_put_off_one_that_may_not(home: Path) -> None:
    program = Program(home)
    program.start("deaf", "deaf lines = 100000")
    follow(program, "deaf", bytearray(), until=20)
    asked = {program.send(do="stop", run="deaf", seconds=seconds) for seconds in (1, 600)}
    answers = [program.read(), program.read()]
    assert {answer["id"] for answer in answers} == asked
    assert [answer["state"] for answer in answers] == ["stopped", "stopped"]
    program.close()


def test_where_the_end_cannot_be_written_the_keeper_waits_with_it(home: Path) -> None:
    program = Program(home)
    program.start("full", "lines = 200")
    (home / "runs/full/node/0/end.json").mkdir()  # as a full disk
    log = home / "runs/full/node/0/output.log"
    while b"line 199" not in log.read_bytes():
        time.sleep(0.05)
    time.sleep(0.5)
    assert program.row("full")["state"] == "running"
    (home / "runs/full/node/0/end.json").rmdir()
    assert program.wait("full", "ended")["exit_code"] == 0
    program.close()


def test_what_a_run_writes_over_its_own_records_hides_no_other_run(home: Path) -> None:
    program = Program(home, "--watch", str(home / "watched"))
    for name in ("bad", "good"):
        program.start(name)
        program.wait(name, "ended")
    (home / "runs/bad/node/0/job.json").write_text(json.dumps({"host": processes.identity(1)["host"], "rank": "x"}))
    (home / "watched/run").mkdir(parents=True)
    (home / "watched/run/config.toml").write_text("[training]\nsteps = 7\n")
    (home / "watched/run/metrics.jsonl").write_text('{"step": "many", "loss": []}\n')
    records = {"deep/metrics.jsonl": "[" * 60_000, "odd/.lock": f"process {10**30} on {processes.identity(1)['host']}"}
    for name, text in records.items():
        (home / "watched" / name).parent.mkdir()
        (home / "watched" / name).write_text(text)
        (home / "watched" / name).with_name("config.toml").write_text("[training]\nsteps = 7\n")
    (home / "runs/worse/node/0").mkdir(parents=True)
    job = {"host": processes.identity(1)["host"], "code": "", "starter": []}
    (home / "runs/worse/node/0/job.json").write_text(json.dumps(job))
    (home / "runs/worse/node/1").mkdir()
    (home / "runs/worse/node/1/job.json").write_text("[" * 60_000)
    why = {(row["run"], row["rank"]): row["trouble"] for row in program.ask(do="runs")["runs"]}
    said = {"bad": "rank = 'x': Input should be", "worse": "node/1/job.json is no record", "good": ""}
    said |= {"@0/run": "step = 'many': Input", "@0/deep": "", "@0/odd": ""}
    assert all(words in why.pop((run, 0 if run == "good" else None)) for run, words in said.items()), why
    log = bytearray()
    follow(program, "good", log)
    assert log.count(b"line") == 3
    program.close()


def test_a_start_or_a_stop_that_hangs_is_given_up_with_its_reason(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders, archives = Folders(home / "runs", []), Archives(home / "code", [])
    here = jobs.Jobs(folders, archives, [])

    def start(run: str) -> Path:
        return here.start(Start(id=1, run=run, config="lines = 100000", code=HASH))

    with monkeypatch.context() as patch, pytest.raises(Refusal, match="checks its configuration for over"):
        patch.setattr(jobs, "_CHECK_SECONDS", 0.001)
        start("a")
    with monkeypatch.context() as patch, pytest.raises(Refusal, match="keeper of the run does not start"):
        patch.setattr(jobs, "PACKAGE", home / "nowhere/torchtitan")
        (home / "nowhere").mkdir()
        patch.setenv("PYTHONPATH", "")
        start("b")
    keeper = processes.read_record(start("c") / "keeper.json")["pid"]
    os.kill(keeper, signal.SIGSTOP)
    with monkeypatch.context() as patch, pytest.raises(Refusal, match="its keeper hangs"):
        patch.setattr(jobs, "_SECONDS_MORE", 0.1)
        here.stop("c", 0)
    os.kill(keeper, signal.SIGCONT)
    with monkeypatch.context() as patch, pytest.raises(Refusal, match="cannot be killed"):
        patch.setattr(jobs.processes, "end_all", lambda mark, keeper: [1])  # as in a driver that hangs
        here.stop("c", 0)
    assert here.stop("c", 0) == "stopped" and processes_of(home) == {}
