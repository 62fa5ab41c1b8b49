"""Try a swarm on this machine: a syncer and a few sites of one process each, beside a single run with the same tokens.

    python -m torchtitan swarm try --sites 3

Ends with a table and result.json. The single run has the batches of all sites together in each step.
"""

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from titan_fleet.swarm.join import require_packages
from torchtitan.refusal import Refusal
from torchtitan.root import ROOT

HELP = "a syncer and three sites on this machine, beside a single run"
CONFIG = "train_configs/debug_model.toml"
SECONDS = 1800  # after which something hangs


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sites", type=int, default=3, help="how many sites (%(default)s)")
    parser.add_argument("--steps", type=int, default=60, help="steps of each site (%(default)s)")
    parser.add_argument("--every", type=int, default=20, help="steps between two meetings (%(default)s)")
    parser.add_argument("--codec", default="int8", help="how numbers travel (%(default)s)")
    parser.add_argument("--out", default="outputs/swarm", help="the folder for all of it (%(default)s)")
    parser.epilog = "Options of the run may follow --, as --model.flavor 100M."


def run(args: argparse.Namespace, options: Sequence[str]) -> None:
    require_packages()
    from titan_fleet.swarm.certificates import make

    out = Path(args.out)
    if out.exists():
        raise Refusal(f"{out} exists; remove it, or name another --out")
    if args.sites < 2:
        raise Refusal(f"--sites {args.sites}: a swarm has 2 sites or more")
    names = [f"site-{number + 1}" for number in range(args.sites)]
    make(out / "keys", ["127.0.0.1"], names)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    swarm = ["--swarm.every", args.every, "--swarm.quorum", args.sites, "--swarm.sites", args.sites]
    swarm += ["--swarm.delay", min(5, args.every - 1), "--swarm.codec", args.codec]
    common = ["--training.steps", args.steps, "--validation.freq", args.steps, "--checkpoint.no-enable"]
    common += ["--training.local_batch_size", 2, *options]
    url = f"https://127.0.0.1:{port}"
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # so that what it starts ends, too
    begun = time.monotonic()
    serve = [sys.executable, "-m", "torchtitan", "swarm", "serve", CONFIG, "--keys", out / "keys/syncer", "--out"]
    syncer = _start([*serve, out / "syncer", "--host", "127.0.0.1", "--port", port, "--", *swarm, *options])
    sites: list[subprocess.Popen[bytes]] = []
    try:
        for name in names:
            own = ["--swarm.syncer", url, "--swarm.site", name, "--swarm.keys", out / "keys" / name]
            run_options = [*swarm, *own, *common, "--training.global_batch_size", 2, "--job.dump_folder", out / name]
            sites.append(_start(_training(run_options), out / f"{name}.log"))
        _wait(sites, names, out, syncer)
    finally:
        for process in (*sites, syncer):
            process.terminate()
            process.wait()
    seconds = time.monotonic() - begun
    print("the same tokens in a single run:")
    single = [*common, "--training.global_batch_size", 2 * args.sites, "--job.dump_folder", out / "single"]
    _wait([_start(_training(single), out / "single.log")], ["single"], out)
    _report(out, names, seconds)


def _training(options: Sequence[Any]) -> list[Any]:
    return [sys.executable, ROOT / "train.py", "--job.config_file", ROOT / CONFIG, *options]


def _start(words: Sequence[Any], log: Path | None = None) -> subprocess.Popen[bytes]:
    environment = os.environ | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    if log is None:
        return subprocess.Popen([*map(str, words)], cwd=ROOT, env=environment)
    with open(log, "wb") as file:
        return subprocess.Popen([*map(str, words)], cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT)


def _wait(
    processes: Sequence[subprocess.Popen[bytes]],
    names: Sequence[str],
    out: Path,
    needed: subprocess.Popen[bytes] | None = None,
) -> None:
    """Until all have ended; refuses as soon as one of them fails, or what they need has ended."""
    ends = time.monotonic() + SECONDS
    while any(process.poll() is None for process in processes) and not any(p.poll() for p in processes):
        if needed is not None and needed.poll() is not None:
            raise Refusal(f"the syncer has ended with {needed.returncode}; what it said stands above")
        if time.monotonic() > ends:
            raise Refusal(f"after {SECONDS} s this has not ended; the files {out}/*.log say where it stands")
        time.sleep(0.1)
    for process, name in zip(processes, names, strict=True):
        if code := process.poll():
            tail = (out / f"{name}.log").read_text(errors="replace").strip().splitlines()[-5:]
            raise Refusal("\n  ".join([f"{name} ended with {code}; the end of {out / name}.log:", *tail]))


def _report(out: Path, names: Sequence[str], seconds: float) -> None:
    meetings = {name: _lines(out / name / "swarm.jsonl") for name in names}
    losses = {name: _lines(out / name / "validation.jsonl")[-1]["validation_loss"] for name in (*names, "single")}
    sums = [{(m["fragment"], m["version"]): m["checksum"] for m in each} for each in meetings.values()]
    result = {
        "sites": len(names),
        "meetings": len(sums[0]),
        "bytes_up": sum(m["bytes_up"] for each in meetings.values() for m in each),
        "seconds": round(seconds, 1),
        "loss_swarm": sum(losses[name] for name in names) / len(names),
        "loss_single": losses["single"],
        "anchors_equal": all(each == sums[0] for each in sums),
    }
    (out / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    print(f"{'':14} {'meetings':>8} {'MB up':>8} {'MB down':>8} {'waited s':>8}  loss of held-out text")
    for name in names:
        up, down, waited = (sum(m[key] for m in meetings[name]) for key in ("bytes_up", "bytes_down", "waited_seconds"))
        print(f"{name:14} {len(meetings[name]):8} {up / 1e6:8.2f} {down / 1e6:8.2f} {waited:8.1f}  {losses[name]:.4f}")
    print(f"{'single run':14} {'':35}  {losses['single']:.4f}")
    equal = "equal to the bit at all sites" if result["anchors_equal"] else "NOT equal"
    print(f"anchors after each meeting: {equal}; {out / 'result.json'}")


def _lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]
