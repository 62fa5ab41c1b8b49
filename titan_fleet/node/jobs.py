"""Starts and stops this node's part of a run. A job is data: none of its words reaches a shell."""

import os
import re
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from titan_fleet.node import processes
from titan_fleet.node.archives import Archives
from titan_fleet.node.folders import PLAN, Folders, state_of
from titan_fleet.node.messages import CLUSTER, Start, State, ValidationError, why
from torchtitan.launch import bounded
from torchtitan.launch.node import SECONDS_TO_SAVE
from torchtitan.refusal import Refusal
from torchtitan.root import PACKAGE

# What a job may set. Names that make a library load a file, or write one, are refused all the same.
_ALLOWED = re.compile(
    "(NCCL|GLOO|TORCH_NCCL|TORCH_DISTRIBUTED)_[A-Z0-9_]+|OMP_NUM_THREADS|CUDA_(VISIBLE_DEVICES|DEVICE_MAX_CONNECTIONS)"
    "|PYTORCH(_CUDA)?_ALLOC_CONF|HF_(HUB|DATASETS)_OFFLINE|TOKENIZERS_PARALLELISM|NO_COLOR"
    "|MAX_RESTARTS|RDZV_TIMEOUT|LOG_RANK"
)
_FILES = re.compile(".*_(PLUGIN|FILE|DIR|PATH|LIB)")
_NEVER = re.compile("(LD|DYLD|PYTHON|BASH|GIT)[A-Z0-9_]*|PATH|HOME|ENV|IFS|SHELL")
# This node's own launcher or login may have set these; the job alone places its ranks.
_PLACE = re.compile(
    "(PET|SLURM|SKYPILOT|RUNAI|TORCHELASTIC|SSH)_.*|NNODES|NODE_RANK|MASTER_(ADDR|PORT)|NGPU|(LOCAL_)?(RANK|WORLD_SIZE)"
    "|CONFIG_FILE|COMM_MODE|PRINT_ONLY|DRY_RUN|PYTHONSAFEPATH"
)
_CHECK_SECONDS, _KEEPER_SECONDS, _SECONDS_MORE = 120, 60, 30


class Jobs:
    def __init__(self, folders: Folders, archives: Archives, more_names: Sequence[str]) -> None:
        self._folders, self._archives, self._more = folders, archives, set(more_names)
        self._lock, self._stops = threading.Lock(), threading.Lock()

    def start(self, job: Start) -> Path:
        """Start a keeper with this node's ranks; the folder of this part of the run."""
        processes.need_linux()
        place = self._archives.place_of(job.code)
        if not place.is_dir():
            raise Refusal(f"code {place.name} is not here; send it by `put`, or ask `has` to fetch a commit")
        job = self._as_before(job) if job.again else job
        environment = self._environment(job)
        mark = secrets.token_hex(16)
        record: dict[str, Any] = {"mark": mark, "code": str(place), "host": socket.gethostname()}
        record |= {"rank": job.rank, "nodes": job.nodes, "started": time.time()}
        # A client that reads the run's files may read the record. What --env allows may be secret, so it is left out.
        kept = {name: value for name, value in job.environment.items() if name not in self._more}
        record |= {"environment": kept, "ranks_here": job.ranks_here}
        record["head"] = f"{job.head}:{job.port}" if job.nodes > 1 else None
        record["starter"] = processes.identity(os.getpid())
        with self._lock:  # of two that go on with the same run, the second finds that it runs
            part = self._folders.prepare(job)
            folder = part.parent.parent
            command = [sys.executable, "-m", "torchtitan.tools.start", "--job.dump_folder", str(folder)]
            command += ["--job.plan", PLAN] if job.plan else []  # it lies beside job.toml
            if job.probes:
                command = [sys.executable, "-m", "torchtitan", "probe", "--out", str(folder / CLUSTER)]
                command += [] if job.probes == "auto" else ["--dtype", job.probes]
            processes.write_record(part / "job.json", record | {"command": command})
        environment |= {"CONFIG_FILE": str(part / "job.toml"), "PYTHONUNBUFFERED": "1"}
        environment["PET_LOG_DIR"] = str(part / "ranks")  # torchrun keeps there what each rank prints
        try:
            _check(command, place, environment)
            keeper = [sys.executable, "-m", "titan_fleet.node.keeper", str(part)]
            quiet: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
            environment[processes.MARK] = mark
            subprocess.run(keeper, cwd=PACKAGE.parent, env=environment, timeout=_KEEPER_SECONDS, check=False, **quiet)
            if not (part / "keeper.json").exists():
                raise Refusal(f"the keeper of the run does not start; look at the space and the processes of {folder}")
        except BaseException as error:
            end = {"state": "failed", "exit_code": None, "ended": time.time(), "why": str(error)}
            if not (part / "keeper.json").exists():
                processes.write_record(part / "end.json", end)
            raise
        return part

    def _as_before(self, job: Start) -> Start:
        """A run that goes on has the variables and the ranks that it had, where its new start gives none."""
        old = processes.read_record(self._folders.part_of(job) / "job.json")
        kept = {name: old[name] for name in ("environment", "ranks_here") if old.get(name) is not None}
        try:  # the run's code may have written it
            before = Start.model_validate(job.model_dump() | kept)
        except ValidationError as error:
            raise Refusal(
                f"run = {job.run} cannot go on: its job.json has {why(error)}; start it under a new name"
            ) from None
        environment, ranks = dict(before.environment), job.ranks_here or before.ranks_here
        if job.ranks_here and not environment.get("CUDA_VISIBLE_DEVICES"):  # it was on the CPU, and need not be now
            environment.pop("CUDA_VISIBLE_DEVICES", None)
        return job.model_copy(update={"environment": environment | job.environment, "ranks_here": ranks})

    def _environment(self, job: Start) -> dict[str, str]:
        for name in job.environment:
            is_allowed = name in self._more or (_ALLOWED.fullmatch(name) and not _FILES.fullmatch(name))
            if not is_allowed or _NEVER.fullmatch(name):
                raise Refusal(
                    f"environment.{name} may not be set by a job; leave it out, or give the node --env {name}"
                )
        saves = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(SECONDS_TO_SAVE)}  # torchrun's own 30 s would break a save off
        environment = saves | own_environment() | job.environment
        if job.ranks_here is not None:
            environment["NGPU"] = str(job.ranks_here)
        if job.nodes > 1:
            if job.head is None or job.port is None:
                raise Refusal(f"nodes = {job.nodes} without head and port; name an address of node 0 that all reach")
            environment |= {"NNODES": str(job.nodes), "NODE_RANK": str(job.rank)}
            environment |= {"MASTER_ADDR": job.head, "MASTER_PORT": str(job.port)}
        return environment

    def stop(self, run: str, seconds: int) -> State:
        """Ask this node's part to end, and return only when no process of it is left; how it ended."""
        processes.need_linux()
        parts = self._folders.parts(run)
        for part in parts:
            if state_of(part) == "running":
                self._ask(part / "stop.json", seconds)
        return [_wait(part, time.monotonic() + seconds + _SECONDS_MORE) for part in parts][-1] if parts else "lost"

    def _ask(self, file: Path, seconds: int) -> None:
        """Keep the least of what was asked: of two requests, the later may arrive first."""
        with self._stops:
            asked = processes.read_record(file).get("seconds")
            processes.write_record(file, {"seconds": min(seconds, asked) if isinstance(asked, int) else seconds})


def own_environment() -> dict[str, str]:
    """This program's, without what places ranks."""
    return {name: value for name, value in os.environ.items() if not _PLACE.fullmatch(name)}


def _wait(part: Path, end: float) -> State:
    while (state := state_of(part)) == "running":
        if time.monotonic() > end:
            raise Refusal(f"{part.parent.parent.name} does not end: its keeper hangs; look at this machine")
        time.sleep(0.05)
    mark = processes.read_record(part / "job.json").get("mark")
    if not isinstance(mark, str) or not re.fullmatch("[0-9a-f]{32}", mark):
        raise Refusal(
            f"{part / 'job.json'} does not tell the run's processes from others any more; look at this machine"
        )
    left = processes.end_all(mark, None)
    if left:
        raise Refusal(f"processes {left} of this run cannot be killed; a driver hangs, restart the machine")
    if state == "lost":
        processes.write_record(part / "end.json", {"state": "stopped", "exit_code": None, "ended": time.time()})
        return "stopped"
    return state


def _check(command: list[str], place: Path, environment: dict[str, str]) -> None:
    """Let the job's own code read its configuration and the machine, as PRINT_ONLY=1 does, before a run exists."""
    try:
        done = bounded.output(command, _CHECK_SECONDS, cwd=place, env=environment | {"PRINT_ONLY": "1"})
    except subprocess.TimeoutExpired:
        raise Refusal(f"the code checks its configuration for over {_CHECK_SECONDS} s; look at the node") from None
    if done.returncode:
        raise Refusal((done.stderr or done.stdout).decode(errors="replace").strip()[-3000:] or "the check fails")
