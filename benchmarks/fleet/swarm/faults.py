"""A swarm of three sites under faults, and one run with data parallelism and restarts under the same ones.

    sudo .venv/bin/python -m benchmarks.fleet.swarm.faults --faults 100 --every 45

A step takes 0.1 s and no processor (slow_step.py), so the machines of the emulated sites do not share their speed.
Goodput: steps that were kept, over those of the undisturbed minute before. A fault that has no like in one datacenter
(a line, the syncer) costs the run with data parallelism nothing; a cut line stops one of its ranks as long.
"""

import argparse
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.fleet.swarm.line import Line
from benchmarks.fleet.swarm.program import Program
from titan_fleet.swarm.certificates import context, make
from torchtitan.hardware import EXIT_UNFINISHED
from torchtitan.refusal import Refusal

RUN = """
[model]
name = "benchmarks.fleet.swarm.slow_step:SPEC"
[training]
local_batch_size = {local}
global_batch_size = {batch}
num_streams = {batch}
steps = 1000000
epochs = 1000
mixed_precision_param = "float32"
[lr_scheduler]
warmup_steps = 1
decay_ratio = 0.0
[activation_checkpoint]
mode = "none"
[metrics]
log_freq = 5
enable_tensorboard = false
[debug]
seed = 0
[comm]
train_timeout_seconds = 40
[checkpoint]
enable = true
interval = 50
keep_latest_k = 2
"""
SWARM = """
[swarm]
every_seconds = 8.0
fragments = 2
delay = 20
quorum = 1
sites = 3
grace_seconds = 1.0
"""
SHIFTED_CLOCK = """
import os, time
_time = time.time
def time_here():
    try:
        return _time() + float(open(os.environ["CLOCK"]).read())
    except (KeyError, OSError, ValueError):
        return _time()
time.time = time_here
"""
SITES = 3
DISK_BYTES = 64 << 20
KINDS = (
    *("kill a rank", "kill a site", "kill the syncer", "stop a site", "stop the syncer", "cut a line"),
    *("slow a line down", "spoil bytes on a line", "a corrupt body", "a full disk at the syncer", "a clock that jumps"),
    "not a number",
)


class Bench:
    def __init__(self, out: Path, seed: int) -> None:
        self.out, self.chance = out, random.Random(seed)
        out.mkdir(parents=True)
        (out / "sitecustomize.py").write_text(SHIFTED_CLOCK)
        (out / "swarm.toml").write_text(RUN.format(local=2, batch=4) + SWARM)
        (out / "whole.toml").write_text(RUN.format(local=4, batch=12))
        self.names = [f"site-{number}" for number in range(SITES)]
        make(out / "keys", ["127.0.0.1"], self.names)
        (out / "syncer").mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", out / "syncer"], check=True)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        words = [
            sys.executable,
            "-m",
            "torchtitan",
            "swarm",
            "serve",
            out / "swarm.toml",
            "--keys",
            out / "keys/syncer",
        ]
        words += ["--out", out / "syncer", "--host", "127.0.0.1", "--port", self.port]
        self.syncer = Program("syncer", out / "syncer", words, self.own("syncer"))
        self.lines = [Line(self.port) for _ in self.names]
        self.sites = [self.site(number) for number in range(SITES)]
        launch = {"NGPU": str(SITES), "MAX_RESTARTS": "100000", "CONFIG_FILE": str(out / "whole.toml")}
        self.whole = Program(
            "whole",
            out / "whole",
            ["./run_llama_train.sh", "--job.dump_folder", out / "whole"],
            launch | self.own("whole"),
        )
        self.later: list[tuple[float, Callable[[], Any]]] = []
        self.answers: list[int] = []  # of the syncer to corrupt bodies
        self.memory: dict[tuple[str, int], list[int]] = {}

    def own(self, name: str) -> dict[str, str]:
        return {
            "POISON": str(self.out / f"{name}.poison"),
            "CLOCK": str(self.out / f"{name}.clock"),
            "PYTHON": sys.executable,
        }

    def site(self, number: int) -> Program:
        name = self.names[number]
        words = ["--swarm.syncer", f"https://127.0.0.1:{self.lines[number].port}", "--swarm.site", name]
        words += ["--swarm.keys", self.out / "keys" / name, "--job.dump_folder", self.out / name]
        if number == 0:  # of two ranks, which torchrun starts again
            launch = {"NGPU": "2", "MAX_RESTARTS": "100000", "CONFIG_FILE": str(self.out / "swarm.toml")}
            return Program(name, self.out / name, ["./run_llama_train.sh", *words], launch | self.own(name))
        one = ["--training.local_batch_size", "4", "--job.config_file", self.out / "swarm.toml"]
        return Program(name, self.out / name, [sys.executable, "train.py", *one, *words], self.own(name))

    @property
    def programs(self) -> list[Program]:
        return [self.syncer, *self.sites, self.whole]

    def pass_time(self, seconds: float) -> None:
        ends = time.monotonic() + seconds
        while (now := time.monotonic()) < ends:
            for program in self.programs:
                program.tend()
            due = [act for when, act in self.later if when <= now]
            self.later = [(when, act) for when, act in self.later if when > now]
            for act in due:
                act()
            time.sleep(0.1)

    def after(self, seconds: float, act: Callable[[], Any]) -> None:
        self.later.append((time.monotonic() + seconds, act))

    # --- faults

    def fault(self, kind: str) -> str:
        number, seconds = self.chance.randrange(SITES), self.chance.uniform(3, 15)
        site, line = self.sites[number], self.lines[number]
        rank = self.chance.randrange(SITES)  # of the run with data parallelism
        match kind:
            case "kill a rank":
                self._kill_a_rank(self.sites[0], rank)
                self._kill_a_rank(self.whole, rank)
                return "site-0"
            case "kill a site":
                site.send(signal.SIGKILL, site.all())
                self._kill_a_rank(self.whole, rank)
            case "kill the syncer":
                self.syncer.send(signal.SIGKILL, self.syncer.all())
                return "syncer"
            case "stop a site":
                self._stop(site, site.ranks(), seconds)
                self._stop(self.whole, self.whole.ranks()[rank : rank + 1], seconds)
            case "stop the syncer":
                self._stop(self.syncer, self.syncer.all(), seconds)
                return f"syncer, {seconds:.0f} s"
            case "cut a line":
                line.is_cut = True
                self.after(seconds, lambda: setattr(line, "is_cut", False))
                self._stop(self.whole, self.whole.ranks()[rank : rank + 1], seconds)
            case "slow a line down":
                line.rate = 64e3
                self.after(3 * seconds, lambda: setattr(line, "rate", 0.0))
            case "spoil bytes on a line":
                line.spoils = True
            case "a corrupt body":
                self.answers += self._send_corrupt(number)
            case "a full disk at the syncer":
                self._fill(seconds)
                return f"{seconds:.0f} s"
            case "a clock that jumps":
                victim = self.chance.choice(["syncer", site.name])
                (self.out / f"{victim}.clock").write_text(str(self.chance.choice([-7200, -30, 30, 7200])))
                return victim
            case _:
                (self.out / f"{site.name}.poison").touch()
                (self.out / "whole.poison").touch()
        return f"{site.name}, {seconds:.0f} s" if kind.startswith(("stop", "cut", "slow")) else site.name

    def _kill_a_rank(self, program: Program, rank: int) -> None:
        if ranks := program.ranks():
            program.send(signal.SIGKILL, [ranks[rank % len(ranks)]])

    def _stop(self, program: Program, processes: Sequence[int], seconds: float) -> None:
        program.send(signal.SIGSTOP, processes)
        self.after(seconds, lambda: program.send(signal.SIGCONT, processes))

    def _fill(self, seconds: float) -> None:
        filler = self.out / "syncer/filler"
        try:
            with filler.open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(1 << 16))
        except OSError:
            self.after(seconds, lambda: filler.unlink(missing_ok=True))

    def _send_corrupt(self, number: int) -> list[int]:
        """With a site's own certificate: bytes at random, a header that lies, and a body that is too long."""
        import httpx

        keys, url = self.out / "keys" / self.names[number], f"https://127.0.0.1:{self.port}"
        try:
            with httpx.Client(base_url=url, verify=context(keys, is_server=False), timeout=10) as client:
                told = client.get("/status").json()
                place = f"/{told['run']}/{told['sites'][self.names[number]]['session']}/0"
                bodies = [self.chance.randbytes(5000), b"\xff\xff\xff\x7f{}", b"\2\0\0\0{}", bytes(200 << 20)]
                return [client.post(f"{place}/difference", content=body).status_code for body in bodies]
        except httpx.HTTPError:
            return [0]  # it closed the connection, or was not there

    # --- what came of it

    def note_memory(self) -> None:
        for program in [self.syncer, *self.sites]:
            for process in program.all():
                try:
                    kib = [
                        line.split()[1]
                        for line in Path(f"/proc/{process}/status").read_text().splitlines()
                        if line.startswith("VmRSS")
                    ]
                except OSError:
                    continue
                if kib:
                    self.memory.setdefault((program.name, process), []).append(int(kib[0]) // 1024)

    def checksums(self) -> list[dict[tuple[int, int], int]]:
        files = [self.out / name / "swarm.jsonl" for name in self.names]
        lines = [[json.loads(line) for line in file.read_text().splitlines()] for file in files]
        return [{(m["fragment"], m["version"]): m["checksum"] for m in each} for each in lines]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--every", type=float, default=45.0, help="seconds from one fault to the next")
    parser.add_argument("--before", type=float, default=60.0, help="undisturbed seconds first")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", default=KINDS)
    parser.add_argument("--out", type=Path, default=Path("outputs/swarm_faults"))
    args = parser.parse_args()
    if os.geteuid():
        raise Refusal("a full disk is a tmpfs of its own here, which only root may mount; use sudo")
    bench = Bench(args.out.absolute(), args.seed)
    try:
        ride(bench, args)
    finally:
        for program in bench.programs:
            program.send(signal.SIGCONT, program.all())
            program.send(signal.SIGKILL, program.all())
        for program in bench.programs:
            if program.process is not None:
                program.process.wait()
        subprocess.run(["umount", bench.out / "syncer"], check=True)


def ride(bench: Bench, args: argparse.Namespace) -> None:
    runs = [*bench.sites, bench.whole]
    waited = time.monotonic()
    while any(run.step() < 20 for run in runs):
        bench.pass_time(1)
        if time.monotonic() - waited > 180:
            raise Refusal(f"not all runs have begun within 180 s; the files {bench.out}/*.log say why")
    before, began = [run.step() for run in runs], time.monotonic()
    bench.pass_time(args.before)
    rates = [(run.step() - step) / (time.monotonic() - began) for run, step in zip(runs, before, strict=True)]
    print(
        "undisturbed steps a second:",
        ", ".join(f"{r.name} {rate:.2f}" for r, rate in zip(runs, rates, strict=True)),
        flush=True,
    )
    kinds = [
        kind
        for _ in range(-(-args.faults // len(args.only)))
        for kind in bench.chance.sample(args.only, len(args.only))
    ]
    before, began = [run.step() for run in runs], time.monotonic()
    for number, kind in enumerate(kinds[: args.faults]):
        what = bench.fault(kind)
        bench.pass_time(args.every * bench.chance.uniform(0.8, 1.2))
        bench.note_memory()
        kept = [
            (run.step() - s) / r / (time.monotonic() - began) for run, s, r in zip(runs, before, rates, strict=True)
        ]
        said = ", ".join(f"{each:.3f}" for each in kept)
        print(
            f"{number + 1:3} {time.monotonic() - began:6.0f} s  {kind:26} {what:14} goodput so far {said}", flush=True
        )
    seconds = time.monotonic() - began
    kept = [(run.step() - s) / r / seconds for run, s, r in zip(runs, before, rates, strict=True)]
    report(bench, kept, seconds)


def report(bench: Bench, kept: Sequence[float], seconds: float) -> None:
    versions = [max(sums, key=lambda key: key[1]) for sums in bench.checksums()]
    bench.pass_time(40)  # all that is needed for a meeting of all
    for site in bench.sites:
        site.send(signal.SIGTERM, site.ranks())
    codes = [site.process.wait(60) for site in bench.sites if site.process is not None]
    sums = bench.checksums()
    common = set(sums[0]) & set(sums[1]) & set(sums[2])
    unequal = [key for key in common if len({each[key] for each in sums}) > 1]
    went_on = all(max(v for _, v in each) > version for each, (_, version) in zip(sums, versions, strict=True))
    swarm = sum(kept[:SITES]) / SITES
    print(f"{seconds:.0f} s: goodput of the sites {swarm:.3f}, of data parallelism with restarts {kept[SITES]:.3f}")
    print(f"meetings of all three: {len(common)}, with unequal anchors: {len(unequal)}; all met at the end: {went_on}")
    starts = ", ".join(f"{program.name} {program.starts}" for program in bench.programs)
    print(f"ended with {codes} (saved and can go on: {EXIT_UNFINISHED}); starts: {starts}")
    print(f"answers to corrupt bodies: {sorted(bench.answers)}")
    for name in ("syncer", *bench.names):
        lives = [mib for (whose, _), mib in bench.memory.items() if whose == name and len(mib) >= 4]
        print(f"MiB of {name}, a minute after its start and at its end: {', '.join(f'{m[1]}-{m[-1]}' for m in lives)}")


if __name__ == "__main__":
    main()
