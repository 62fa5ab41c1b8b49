"""What a swarm costs its sites over slow links: steps a second beside the same sites that never exchange.

    sudo .venv/bin/python -m torchtitan netem benchmarks/fleet/swarm/sites.toml --case "four sites and a syncer" -- \
        .venv/bin/python -m benchmarks.fleet.swarm.links outputs/swarm_links

Runs at each site of netem; that of the region syncer serves. A step takes 0.5 s and little processor (slow_step.py), so
that the sites do not share the cores of this machine. 8.4M parameters, int8, four fragments, every 50 steps.

With --text the sites train train_configs/swarm_debug.toml at 0.3 s a step (slow_train.py), and print the loss that
`swarm try --sites 4` compares with one run's. With --faults the third site is killed for a third of the run, and the
fourth stands still half of the time.
"""

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import tomli
import tomli_w

from titan_fleet.swarm.certificates import make
from torchtitan.observe.curve import read_losses
from torchtitan.root import ROOT

RUN = """
[model]
name = "benchmarks.fleet.swarm.slow_step:SPEC"
[training]
local_batch_size = 4
global_batch_size = 4
epochs = 1000
mixed_precision_param = "float32"
[lr_scheduler]
warmup_steps = 1
[activation_checkpoint]
mode = "none"
[metrics]
log_freq = 1
enable_tensorboard = false
[debug]
seed = 0
[swarm]
sites = {sites}
quorum = 2
every = {every}
delay = {delay}
codec = "int8"
"""
MODEL = {"OMP_NUM_THREADS": "1", "WIDTH": "1024", "LAYERS": "8", "STEP_SECONDS": "0.5"}
SYNCER, PORT = "syncer-0", 29700


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--every", type=int, default=50)
    parser.add_argument("--delay", type=int, default=8)
    parser.add_argument("--text", action="store_true", help="train the debug model of swarms")
    parser.add_argument("--every_seconds", type=float, help="let the sites meet by time, with --text")
    parser.add_argument("--faults", action="store_true", help="kill a site for a third of the run, and slow one down")
    args = parser.parse_args()
    out, own, count = args.out.absolute(), os.environ["SITE"], int(os.environ["NNODES"]) - 1
    if own == SYNCER:
        serve(out, args, count)
        return
    await_file(out / "ready")
    alone = train(out / f"{own}-alone", out, args, args.steps // 2, [])
    link = ["--swarm.syncer", f"https://{SYNCER}:{PORT}", "--swarm.site", own, "--swarm.keys", str(out / "keys" / own)]
    (out / f"{own}.alone").touch()
    while len(list(out.glob("*.alone"))) < count:
        time.sleep(0.2)
    fault = ("", "", "killed", "slow")[int(os.environ["NODE_RANK"]) - 1] if args.faults else ""
    together = train(out / own, out, args, args.steps, [*link, "--checkpoint.enable"], fault)
    meetings = [json.loads(line) for line in (out / own / "swarm.jsonl").read_text().splitlines()]
    seconds = statistics.median(meeting["seconds"] for meeting in meetings)
    waited = sum(meeting["waited_seconds"] for meeting in meetings[:-4])  # the last four are the end's
    print(
        f"{own}: alone {alone:.3f} steps/s, in the swarm {together:.3f}, ratio {together / alone:.3f}; {len(meetings)} "
        f"meetings of {meetings[0]['bytes_up'] / 1e6:.2f} MB up, median {seconds:.1f} s, {waited:.1f} s waited in all, "
        f"of all sites: {statistics.mean(meeting['participation'] for meeting in meetings):.2f}{loss_of(out / own)}",
        flush=True,
    )
    (out / f"{own}.done").touch()


def serve(out: Path, args: argparse.Namespace, count: int) -> None:
    make(out / "keys", [SYNCER], sites())
    (out / "train.toml").write_text(configuration(args, count))
    words = ["-m", "torchtitan", "swarm", "serve", out / "train.toml", "--keys", out / "keys/syncer", "--out"]
    words += [out / "swarm", "--port", PORT, "--", "--training.steps", args.steps]  # the sites' own
    syncer = launch(words, out / "syncer.log")
    await_port(SYNCER, PORT)
    (out / "ready").touch()
    while len(list(out.glob("*.done"))) < count:
        time.sleep(0.5)
    syncer.terminate()
    syncer.wait()


def configuration(args: argparse.Namespace, count: int) -> str:
    if not args.text:
        return RUN.format(sites=count, every=args.every, delay=args.delay)
    config = tomli.loads((ROOT / "train_configs/swarm_debug.toml").read_text())
    config["swarm"] = {"sites": count, "quorum": 2, "every": args.every, "delay": args.delay, "method": "average"}
    if seconds := args.every_seconds:  # the grace is over half of them, so that sites that are out of step meet
        config["swarm"] |= {"every_seconds": seconds, "grace_seconds": 0.6 * seconds}
    return tomli_w.dumps(config)


def train(
    folder: Path, out: Path, args: argparse.Namespace, steps: int, options: Sequence[str], fault: str = ""
) -> float:
    """Steps a second, without the first few and without the end."""
    words = ["-m", "benchmarks.fleet.swarm.slow_train"] if args.text else ["train.py"]
    words += ["--job.config_file", out / "train.toml", "--training.steps", steps, "--job.dump_folder"]
    words += [folder, "--metrics.log_freq", 1, *options]
    run, log = launch(words, folder.with_suffix(".log")), folder.with_suffix(".log")
    if fault == "killed":
        while step_of(folder) < steps // 3:
            time.sleep(0.1)
        run.kill()
        first = next(path for path in (out / name for name in sites()) if path != folder)
        while step_of(first) < 2 * steps // 3:
            time.sleep(0.1)
        run = launch(words, log)
    while fault == "slow" and run.poll() is None:
        for number in (signal.SIGSTOP, signal.SIGCONT):
            run.send_signal(number)
            time.sleep(0.25)
    if code := run.wait():
        sys.exit(f"the training ended with {code}; {log} says why")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()][5:-1]
    return len(lines) / sum(line["step_seconds"] for line in lines)


def sites() -> list[str]:
    names = [line.split()[-1] for line in Path("/etc/hosts").read_text().splitlines() if line.startswith("10.77.")]
    return [name for name in names if name != SYNCER]


def step_of(folder: Path) -> int:
    points = read_losses(folder / "metrics.jsonl", "loss")
    return points[-1][0] if points else 0


def loss_of(folder: Path) -> str:
    points = read_losses(folder / "validation.jsonl", "validation_loss")
    return f", loss of held-out text {points[-1][1]:.4f}" if points else ""


def launch(words: Sequence[object], log: Path) -> "subprocess.Popen[bytes]":
    with log.open("wb") as file:
        own = os.environ | MODEL
        own = {
            name: value
            for name, value in own.items()
            if name not in ("NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")
        }
        return subprocess.Popen([sys.executable, *map(str, words)], cwd=ROOT, env=own, stdout=file, stderr=file)


def await_file(file: Path) -> None:
    while not file.exists():
        time.sleep(0.1)


def await_port(host: str, port: int) -> None:
    while True:
        try:
            socket.create_connection((host, port), 1).close()
            return
        except OSError:
            time.sleep(0.2)


if __name__ == "__main__":
    main()
