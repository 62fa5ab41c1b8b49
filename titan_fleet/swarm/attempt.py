"""Try a swarm on this machine: a syncer and a few sites, beside one run with the same tokens and one site alone.

    python -m torchtitan swarm try --sites 3

Ends with a table, a picture of the losses and result.json. The one run has the batches of all sites in each step; the
site alone is what somebody has who joins nobody. Each of the three trains at the rate that is best for it.
"""

import argparse
import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli

from titan_fleet.packages import require_packages
from torchtitan.observe.curve import Points, read_losses
from torchtitan.refusal import Refusal
from torchtitan.root import ROOT

HELP = "a syncer and three sites on this machine, beside one run with the same tokens and one site alone"
CONFIG = "train_configs/swarm_debug.toml"
BEST_RATES = {"swarm": 0.024, "single": 0.024, "alone": 0.032}  # of CONFIG; docs/log.md has the grids
BATCH = 16  # of a site
SECONDS = 1800  # after which something hangs


@dataclass(frozen=True)
class Trial:
    out: Path
    sites: int
    steps: int
    every: int
    codec: str
    rates: Mapping[str, float]
    options: Sequence[str]  # of all runs, after the others

    @property
    def names(self) -> list[str]:
        return [f"site-{number + 1}" for number in range(self.sites)]

    def of(self, name: str) -> list[Any]:
        """Options of one run, or of the syncer."""
        is_site = name not in ("single", "alone")
        options = ["--training.steps", self.steps, "--lr_scheduler.total_steps", self.steps]
        options += ["--optimizer.lr", self.rates["swarm" if is_site else name]]
        options += ["--training.global_batch_size", BATCH * (self.sites if name == "single" else 1)]
        if is_site:
            options += ["--swarm.every", self.every, "--swarm.quorum", self.sites, "--swarm.sites", self.sites]
            options += ["--swarm.delay", min(2, self.every - 1), "--swarm.codec", self.codec]
            options += ["--swarm.method", "average"]  # for a momentum there are too few meetings
        return [*options, *self.options]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sites", type=int, default=3, help="how many sites (%(default)s)")
    parser.add_argument("--steps", type=int, default=500, help="steps of each site (%(default)s)")
    parser.add_argument("--every", type=int, default=10, help="steps between two meetings (%(default)s)")
    parser.add_argument("--codec", default="int8", help="how numbers travel (%(default)s)")
    parser.add_argument("--out", default="outputs/swarm", help="the folder for all of it (%(default)s)")
    parser.epilog = "Options of all runs may follow --, as --model.n_layers 4."


def run(args: argparse.Namespace, options: Sequence[str]) -> None:
    compare(Trial(Path(args.out).absolute(), args.sites, args.steps, args.every, args.codec, BEST_RATES, options))


def compare(trial: Trial) -> dict[str, Any]:
    """Trains all of them at the same time, and returns what result.json holds."""
    require_packages()
    from titan_fleet.swarm.certificates import make

    out = trial.out
    if out.exists():
        raise Refusal(f"{out} exists; remove it, or name another --out")
    if trial.sites < 2:
        raise Refusal(f"--sites {trial.sites}: a swarm has 2 sites or more")
    make(out / "keys", ["127.0.0.1"], trial.names)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # so that what it starts ends, too
    serve: list[Any] = [*"-m torchtitan swarm serve".split(), CONFIG, "--keys", out / "keys/syncer"]
    serve += ["--out", out / "syncer", "--host", "127.0.0.1", "--port", port, "--", *trial.of("swarm")]
    syncer, runs = _start(serve, out / "syncer.log"), dict[str, subprocess.Popen[bytes]]()
    try:
        for name in ("single", "alone", *trial.names):
            joins: list[Any] = ["--swarm.syncer", f"https://127.0.0.1:{port}", "--swarm.site", name]
            joins += ["--swarm.keys", out / "keys" / name]
            words = [ROOT / "train.py", "--job.config_file", ROOT / CONFIG, *trial.of(name)]
            # The anchors of all sites are equal, so the curve is that of the first.
            freq = trial.steps if name in trial.names[1:] else max(1, trial.steps // 4)
            words += ["--job.dump_folder", out / name, "--validation.freq", freq]
            # The one run has as much to do as all sites together, so they leave it a core.
            runs[name] = _start(words + joins * (name in trial.names), out / f"{name}.log", name != "single")
        _wait(trial, runs, syncer)
    finally:
        for process in (*runs.values(), syncer):
            process.terminate()
            process.wait()
    return _report(trial)


def _start(words: Sequence[Any], log: Path, yields: bool = False) -> subprocess.Popen[bytes]:
    words = [*(["nice", "-n", "10"] if yields else []), sys.executable, *words]
    environment = os.environ | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    with open(log, "wb") as file:
        return subprocess.Popen([*map(str, words)], cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT)


def _wait(trial: Trial, runs: Mapping[str, subprocess.Popen[bytes]], syncer: subprocess.Popen[bytes]) -> None:
    """Until all have ended; refuses as soon as one of them fails, or the syncer has ended."""
    out = trial.out
    ends, shown = time.monotonic() + SECONDS, 0
    while True:
        have_ended = all(process.poll() is not None for process in runs.values())
        failed = [name for name, process in runs.items() if process.poll()]
        if syncer.poll() is not None and not have_ended:
            failed = ["syncer"]
        if failed:
            log = out / f"{failed[0]}.log"
            tail = log.read_text(errors="replace").strip().splitlines()[-5:]
            raise Refusal("\n  ".join([f"{failed[0]} has ended too early; the end of {log}:", *tail]))
        if have_ended:
            return
        if time.monotonic() > ends:
            raise Refusal(f"after {SECONDS} s this has not ended; the files {out}/*.log say where it stands")
        curves = {name: _curve(out / name) for name in ("site-1", "single", "alone")}
        if (step := min((curve[-1][0] if curve else 0) for curve in curves.values())) > shown:
            shown = step
            swarm, single, alone = (f"{dict(curve)[step]:.3f}" for curve in curves.values())
            losses = f"swarm {swarm}, one run {single}, one site alone {alone}"
            print(f"step {step:4}/{trial.steps}  loss of held-out text: {losses}", flush=True)
        time.sleep(0.2)


def _report(trial: Trial) -> dict[str, Any]:
    from titan_fleet.swarm.drawing import draw_losses

    out, names = trial.out, trial.names
    meetings = {name: _lines(out / name / "swarm.jsonl") for name in names}
    curves = {name: _curve(out / name) for name in (*names, "single", "alone")}
    losses = {name: curve[-1][1] for name, curve in curves.items()}
    held_out = {name: _lines(out / name / "validation.jsonl")[-1]["validation_tokens"] for name in curves}
    if max(held_out.values()) > 1.01 * min(held_out.values()):  # a stream's first token is no label
        print(f"their losses do not compare, being of unlike amounts of text ({held_out}); set validation.steps = -1")
    sums = [{(m["fragment"], m["version"]): m["checksum"] for m in each} for each in meetings.values()]
    up = {name: sum(m["bytes_up"] for m in each) for name, each in meetings.items()}
    weights = json.loads((out / "syncer/run.json").read_text())["weights"]
    of_gradients = 4 * trial.steps * sum(math.prod(shape) for _, shape in weights)  # that a site would send, at least
    result = {
        "sites": trial.sites,
        "meetings": len(sums[0]),
        "bytes_up": sum(up.values()),
        "bytes_up_of_gradients": of_gradients * trial.sites,
        "loss_swarm": sum(losses[name] for name in names) / trial.sites,
        "loss_single": losses["single"],
        "loss_alone": losses["alone"],
        "anchors_equal": all(each == sums[0] for each in sums),
    }
    (out / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    tokens = BATCH * tomli.loads((out / "syncer/config.toml").read_text())["training"]["seq_len"]  # of a site's step
    lines = {"one site alone": ("alone", 1), "one run": ("single", trial.sites), "the swarm": (names[0], trial.sites)}
    drawn = {what: [(step * tokens * of / 1e6, y) for step, y in curves[name]] for what, (name, of) in lines.items()}
    draw_losses(out / "loss.svg", "Loss of held-out text", "million tokens", drawn)
    print(f"{'':14} {'MB up':>8} {'waited s':>9}  loss of held-out text")
    for name in names:
        waited = sum(m["waited_seconds"] for m in meetings[name])
        print(f"{name:14} {up[name] / 1e6:8.1f} {waited:9.1f}  {losses[name]:.4f}")
    print(f"{'one run':14} {of_gradients / 1e6:8.1f} {'':9}  {losses['single']:.4f}")
    print(f"{'one site alone':14} {0:8.1f} {'':9}  {losses['alone']:.4f}")
    beside, alone = (result["loss_swarm"] / result[which] - 1 for which in ("loss_single", "loss_alone"))
    print(
        f"{trial.sites} sites sent 1/{of_gradients / up[names[0]]:.0f} of what one run over their links would; their "
        f"loss is {beside:+.1%} beside that run's, and {alone:+.1%} beside that of a site alone"
    )
    equal = "equal to the bit at all sites" if result["anchors_equal"] else "NOT equal"
    print(f"anchors after each meeting: {equal}; {out / 'loss.svg'}, {out / 'result.json'}")
    return result


def _curve(folder: Path) -> Points:
    return read_losses(folder / "validation.jsonl", "validation_loss")


def _lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().rpartition("\n")[0].splitlines()]
