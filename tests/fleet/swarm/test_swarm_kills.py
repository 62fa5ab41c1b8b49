"""A swarm of real processes, whose syncer and whose sites are killed while they train."""

import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import started
from tests.fleet.swarm.served import keys
from tests.ports import free_port
from tests.tiny_runs import read_records
from torchtitan.hardware import EXIT_UNFINISHED
from torchtitan.tools.runs import look

ROOT = Path(__file__).parents[3]
RUN = """
[model]
name = "tests.tiny_models:LLAMA"
flavor = "tiny"
[training]
dataset = "pydocs"
seq_len = 64
local_batch_size = 4
global_batch_size = 4
steps = 100000
mixed_precision_param = "float32"
[lr_scheduler]
warmup_steps = 1
[activation_checkpoint]
mode = "none"
[debug]
seed = 0
[checkpoint]
enable = true
interval = 25
keep_latest_k = 2
[swarm]
every = 10
fragments = 2
delay = 2
quorum = 1
sites = 2
grace_seconds = 3.0  # over half a round, so that sites with any offset meet on a slow machine
"""


class Swarm:
    def __init__(self, folder: Path) -> None:
        self.folder, self.processes = folder, list[Any]()
        keys(folder, 2)
        (folder / "train.toml").write_text(RUN)
        self.port = free_port()

    def _start(self, name: str, *words: object) -> Any:
        log = open(self.folder / f"{name}.log", "ab")
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        command = [sys.executable, *map(str, words)]
        self.processes.append(started.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log))
        return self.processes[-1]

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()

    def serve(self) -> Any:
        words = "-m", "torchtitan", "swarm", "serve", self.folder / "train.toml", "--keys", self.folder / "keys/syncer"
        return self._start(
            "syncer", *words, "--out", self.folder / "syncer", "--host", "127.0.0.1", "--port", self.port
        )

    def site(self, number: int) -> Any:
        name = f"site-{number}"
        words = ["--swarm.syncer", f"https://127.0.0.1:{self.port}", "--swarm.site", name]
        words += ["--swarm.keys", str(self.folder / "keys" / name), "--job.dump_folder", str(self.folder / name)]
        return self._start(name, "train.py", "--job.config_file", self.folder / "train.toml", *words)

    def said(self, name: str) -> str:
        file = self.folder / f"{name}.log"
        return file.read_text(errors="replace") if file.exists() else ""

    def meetings(self, site: int) -> int:
        return len(re.findall(r"meeting \d+ of fragment", self.said(f"site-{site}")))

    def wait_for(self, condition: Callable[[], bool], what: str, seconds: float = 100) -> None:
        ends = time.monotonic() + seconds
        while not condition():
            tails = (f"{name}: {self.said(name)[-3000:]}" for name in ("syncer", "site-0", "site-1"))
            assert time.monotonic() < ends, "\n".join((what, *tails))
            time.sleep(0.02)


@pytest.fixture
def swarm(tmp_path: Path) -> Iterator[Swarm]:
    started_here = Swarm(tmp_path)
    yield started_here
    started_here.stop()


def test_killed_syncers_and_sites_cost_the_others_nothing(tmp_path: Path, swarm: Swarm) -> None:
    syncer = swarm.serve()
    sites = [swarm.site(0), swarm.site(1)]
    swarm.wait_for(lambda: min(swarm.meetings(0), swarm.meetings(1)) >= 3, "no three meetings")
    assert look(swarm.folder / "syncer")[0] == "running" and look(swarm.folder / "syncer")[1].step
    second = swarm.serve()
    swarm.wait_for(lambda: "is in use by process" in swarm.said("syncer"), "a second syncer took the folder")
    assert second.wait() != 0

    syncer.send_signal(signal.SIGKILL)
    syncer.wait()
    assert look(swarm.folder / "syncer")[0] == "stopped"
    swarm.wait_for(
        lambda: "cannot be reached" in swarm.said("site-0") + swarm.said("site-1"), "both met without a syncer"
    )
    before = [swarm.meetings(0), swarm.meetings(1)]
    syncer = swarm.serve()
    swarm.wait_for(lambda: min(swarm.meetings(n) - before[n] for n in (0, 1)) >= 2, "no meeting with the new syncer")

    sites[1].send_signal(signal.SIGKILL)
    sites[1].wait()
    alone = swarm.meetings(0)
    swarm.wait_for(lambda: swarm.meetings(0) >= alone + 2, "a dead site held the other one")
    sites[1] = swarm.site(1)
    both = "2 of 2, "
    before = [swarm.said(f"site-{number}").count(both) for number in (0, 1)]
    swarm.wait_for(
        lambda: min(swarm.said(f"site-{n}").count(both) - before[n] for n in (0, 1)) >= 3, "no meeting of both again"
    )
    for number, process in enumerate(sites):
        process.send_signal(signal.SIGTERM)  # saves, and ends
        assert process.wait(60) == EXIT_UNFINISHED, swarm.said(f"site-{number}")[-3000:]
    syncer.send_signal(signal.SIGTERM)
    syncer.wait(20)

    seen = [
        {(m["fragment"], m["version"]): m for m in read_records(tmp_path / f"site-{n}", "swarm.jsonl")} for n in (0, 1)
    ]
    common = set(seen[0]) & set(seen[1])
    assert len(common) >= 5 and all(seen[0][each]["checksum"] == seen[1][each]["checksum"] for each in common)
    assert re.search("resum|goes on", swarm.said("site-1"))
