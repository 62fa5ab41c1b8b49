"""The processes of a run, told apart from all others: a keeper by pid, start time, boot and host; what it started by a
mark in the environment or by its parents, for torchrun gives its ranks sessions of their own. Linux only.
"""

import contextlib
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchtitan.foreign import read_small
from torchtitan.refusal import Refusal
from torchtitan.whole_file import write_whole

_RECORD_BYTES = 2**20
MARK = "TORCHTITAN_NODE_RUN"


def need_linux() -> None:
    if sys.platform != "linux":
        raise Refusal(
            f"this node is {sys.platform}, where the processes of a run cannot be told apart; "
            f"start and stop runs on Linux, or here by ./run_llama_train.sh"
        )


def identity(pid: int) -> dict[str, Any]:
    boot = Path("/proc/sys/kernel/random/boot_id")
    known = {"boot": boot.read_text().strip() if boot.exists() else "", "host": socket.gethostname()}
    return {"pid": pid, "start": start_of(pid)} | known


def is_here(known: Mapping[str, Any]) -> bool:
    """Whether it was recorded on this machine. A folder may be shared by several."""
    return bool(known.get("host") == socket.gethostname())


def is_alive(known: Any) -> bool:
    """Whether this very process runs: a pid may have been given to another process, or the machine started anew."""
    pid = known.get("pid") if isinstance(known, dict) else None
    return isinstance(pid, int) and known == identity(pid) and known["start"] is not None


def start_of(pid: int) -> int | None:
    """When a process started, in ticks since the boot; None if it has ended."""
    return _stat(pid)[1]


def of_run(mark: str, keeper: int | None) -> dict[int, int]:
    """Each process of the run but its keeper, with its start."""
    pids = {int(entry) for entry in os.listdir("/proc") if entry.isdecimal()} - {os.getpid()}
    stats = {pid: _stat(pid) for pid in pids}
    found: set[int] = {keeper} if keeper else set()
    for pid in pids:
        with contextlib.suppress(OSError):  # another user's, or just ended
            if f"{MARK}={mark}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                found.add(pid)
    while below := {pid for pid, (parent, _) in stats.items() if parent in found} - found:
        found |= below
    known = {pid: stats[pid][1] for pid in found & pids - {keeper}}
    return {pid: start for pid, start in known.items() if start is not None}


def end_all(mark: str, keeper: int | None, seconds: float = 10) -> list[int]:
    """Kill what is left of a run, also what is started meanwhile. Returns what cannot be killed."""
    end = time.monotonic() + seconds
    while left := of_run(mark, keeper):
        for pid, start in left.items():
            if start_of(pid) == start:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        if time.monotonic() > end:
            return sorted(left)
        time.sleep(0.05)
    return []


def write_record(file: Path, values: Mapping[str, Any]) -> None:
    """Readable by this user alone."""
    write_whole(file, json.dumps(values), private=True)


def read_record(file: Path) -> dict[str, Any]:
    """A record, or {} where there is none. The code of a run may have put there what it likes."""
    try:
        found = json.loads(read_small(file.parent, file.name, _RECORD_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _stat(pid: int) -> tuple[int, int | None]:
    """The parent and the start; no start if the process is gone, or only waits to be reaped."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return 0, None
    return int(fields[1]), None if fields[0] in ("Z", "X") else int(fields[19])
