"""`python -m titan_fleet.node.keeper FOLDER`: starts this node's ranks, stays with them, and writes how they ended.

It has left the node program's session, so it outlives the connection. If it is killed, its ranks are killed too: no run
is without a keeper. It ends only after the last process of the run.
"""

import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from titan_fleet.node import processes

EXIT_UNFINISHED = 75  # as hardware.py has it: the same command resumes the run
_PDEATHSIG, _SUBREAPER = 1, 36  # of prctl
_SECONDS_FOR_A_DISK = 1
_SECONDS = 60  # between the request to end and the kill, where the machine asks


def main(folder: Path) -> None:
    job = processes.read_record(folder / "job.json")
    read, written = os.pipe()
    if os.fork():
        os.close(written)
        os.read(read, 1)  # until the record and the log below are there, or the keeper has died
        os._exit(0)
    os.close(read)
    os.setsid()
    ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)  # orphans of the run stay below this process
    for ignored in (signal.SIGHUP, signal.SIGINT):
        signal.signal(ignored, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: _ask(folder))
    processes.write_record(folder / "keeper.json", processes.identity(os.getpid()))
    with open(folder / "output.log", "ab", buffering=0) as log:
        os.close(written)  # who starts the run finds its log
        log_fd = log.fileno()
        os.dup2(log_fd, 1)
        os.dup2(log_fd, 2)
        code, was_asked = _keep(folder, job)
    left = processes.end_all(job["mark"], os.getpid())
    state = "ended" if code == 0 else "stopped" if was_asked or code == EXIT_UNFINISHED else "failed"
    end = {"state": state, "exit_code": code, "ended": time.time(), "left": left}
    while folder.is_dir():
        try:
            processes.write_record(folder / "end.json", end)
            return
        except OSError:  # the disk is full: until this is written, the run counts as running
            time.sleep(_SECONDS_FOR_A_DISK)


def _ask(folder: Path) -> None:
    if not (folder / "stop.json").exists():
        processes.write_record(folder / "stop.json", {"seconds": _SECONDS})


def _keep(folder: Path, job: dict[str, Any]) -> tuple[int, bool]:
    """The exit code, and whether the run was asked to end."""
    try:
        child = subprocess.Popen(job["command"], cwd=job["code"], stdin=subprocess.DEVNULL, preexec_fn=_as_child)
    except OSError as error:
        print(f"error: {error}; is the environment of this node complete?", file=sys.stderr, flush=True)
        return 127, False
    asked: float | None = None
    while (code := _reap(child.pid)) is None:
        if wish := processes.read_record(folder / "stop.json"):
            if asked is None:
                asked = time.monotonic()
                os.kill(child.pid, signal.SIGINT)  # send_signal may reap the child, whose end would never be seen
            seconds = wish.get("seconds")
            if time.monotonic() - asked >= (seconds if isinstance(seconds, (int, float)) else 0):
                processes.end_all(job["mark"], os.getpid(), seconds=1)
        time.sleep(0.05)
    child.returncode = code
    return code, asked is not None


def _as_child() -> None:
    ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    for default in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(default, signal.SIG_DFL)


def _reap(child: int) -> int | None:
    """The child's exit code once it has ended. Orphans that came to this process are reaped on the way."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return None
        if pid == child:
            return os.waitstatus_to_exitcode(status)
        if pid == 0:
            return None


if __name__ == "__main__":
    main(Path(sys.argv[1]))
