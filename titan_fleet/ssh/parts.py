"""A run on a set of nodes, each with a part of it: starts them all or none, and ends them. A terminal and the console
start runs by this.
"""

import re
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from titan_fleet.node import messages
from titan_fleet.ssh.client import Broken, Node
from titan_fleet.ssh.hosts import Host
from torchtitan.config.schema import Config
from torchtitan.launch.addresses import is_local
from torchtitan.refusal import Refusal

_SECONDS_TO_START = 300  # of one node: its code checks the configuration first
SECONDS_AFTER_A_FAILURE = 15  # of one part, in which the other nodes may say what they saw
T = TypeVar("T")
R = TypeVar("R")


@dataclass
class Part:
    """A host with its place in a run."""

    host: Host
    node: Node
    rank: int = 0
    folder: str = ""
    log: str = ""
    may_run: bool = False  # also where the answer to its start was lost

    @property
    def name(self) -> str:
        return self.host.host

    def row(self, run: str) -> messages.RunRow | None:
        """What the node knows of this part."""
        rows = self.node.ask(messages.Runs).runs
        return next((row for row in rows if row.run == run and row.rank == self.rank and row.is_own), None)


@dataclass(frozen=True)
class Job:
    name: str
    config: str  # TOML
    needs_disk: bool  # that all nodes share
    environment: Mapping[str, str] = field(default_factory=dict)
    plan: str = ""  # of the planner, as JSON
    probes: str | None = None  # the dtype in which it measures links; then it trains nothing
    again: bool = False  # the run is there, and goes on from its newest checkpoint


def new_name(stem: str) -> str:
    return f"{re.sub('[^A-Za-z0-9]+', '-', stem)[:40].strip('-') or 'run'}-{time.strftime('%m%d-%H%M%S')}"


def needs_disk(config: Config) -> bool:
    """Whether all ranks write one checkpoint into a folder."""
    return config.checkpoint.enable and "://" not in config.checkpoint.folder


def at_once(do: Callable[[T], R], things: Sequence[T]) -> list[R]:
    """Do it for all at once; the first refusal, after all have tried. Ctrl-C waits for none of them."""
    futures: list[Future[R]] = [Future() for _ in things]

    def one(thing: T, future: "Future[R]") -> None:
        try:
            future.set_result(do(thing))
        except Exception as error:
            future.set_exception(error)

    for thing, future in zip(things, futures, strict=True):
        threading.Thread(target=one, args=(thing, future), daemon=True).start()
    wait(futures)
    return [future.result() for future in futures]


def start(job: Job, code: messages.Code, parts: Sequence[Part], ssh: Sequence[str]) -> None:
    """Start every part. Where they have to share a disk, the head's first, to see whether they do."""
    head, *others = parts
    if len({max(1, part.host.gpus) for part in parts if part.host.gpus is not None}) > 1:
        given = ", ".join(f"{part.name} {part.host.gpus}" for part in parts)
        raise Refusal(f"the nodes have unlike gpus ({given}), and a run has as many ranks on each; give one number")
    place: dict[str, Any] = {"run": job.name, "nodes": len(parts), "config": job.config, "code": code}
    place |= {"plan": job.plan, "probes": job.probes, "again": job.again}
    if others:
        place |= {"head": address_of(head, ssh), "port": head.node.ask(messages.Port).port}

    def start_one(part: Part) -> None:
        gpus = part.host.gpus
        own = {**job.environment} | ({"CUDA_VISIBLE_DEVICES": ""} if gpus == 0 else {})
        here = {"rank": part.rank, "ranks_here": None if gpus is None else max(1, gpus), "environment": own}
        part.may_run = True
        try:
            answer = part.node.ask(messages.Start, _SECONDS_TO_START, **place, **here)
        except Refusal as error:  # nothing was started; another run of this name is not to be stopped
            part.may_run = isinstance(error, Broken)
            raise
        part.folder, part.log = answer.folder, answer.log

    try:
        at_once(start_one, [head] if job.needs_disk else parts)
        if job.needs_disk:
            at_once(lambda part: _need_disk_of(head, part, job.name), others)
            at_once(start_one, others)
    except Refusal:
        end(job.name, parts, 0)
        raise


def end(run: str, parts: Sequence[Part], seconds: int) -> list[str]:
    """End the run on each node where it may still run; of each where it could not be ended, why."""

    def end_one(part: Part) -> str:
        try:
            for _ in range(3):  # a start may still be on its way
                if part.row(run):
                    part.node.ask(messages.Stop, seconds + 60, run=run, seconds=seconds)
                    part.may_run = False
                    break
                time.sleep(0.5)
        except Refusal as error:
            unknown = f"; the run {run} may go on there" if isinstance(error, Broken) else ""
            return f"[{part.name}] {error}{unknown}"
        return ""

    return [why for why in at_once(end_one, [part for part in parts if part.may_run]) if why]


def _need_disk_of(head: Part, part: Part, run: str) -> None:
    with suppress(Refusal):
        part.node.ask(messages.Read, run=run, path=head.log, size=1)
        return
    raise Refusal(
        f"checkpoints go to {head.folder} of {head.name}, which {part.name} does not share; use a --home on "
        f"a disk that all share, or set checkpoint.folder = 's3://...' or checkpoint.enable = false"
    )


def address_of(head: Part, ssh: Sequence[str]) -> str:
    """Where the nodes meet: as the file says, else the head's one address, else the one by which ssh reaches it."""
    if head.host.address:
        return head.host.address
    own = [address for address in (head.node.report.addresses if head.node.report else {}) if not is_local(address)]
    plain = [address for address in own if ":" not in address] or own
    if len(plain) == 1:
        return plain[0]
    asked = subprocess.run([*ssh, "-G", "--", head.name], capture_output=True, text=True, check=False).stdout
    found = re.search(r"^hostname (\S+)$", asked, re.MULTILINE)
    if found and found[1] in own:
        return found[1]
    raise Refusal(f"{head.name} has the addresses {', '.join(own) or 'of loopback alone'}; give its host an address=")
