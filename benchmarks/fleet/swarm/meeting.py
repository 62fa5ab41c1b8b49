"""A swarm's syncer under sites without models: seconds of a meeting beside the same bytes over plain TLS, and memory.

python -m benchmarks.fleet.swarm.meeting --sites 3 --ranks 2 --parameters 62.5 --codec float32   as Flower was measured
python -m benchmarks.fleet.swarm.meeting --sites 4 --parameters 250 --codec int8                 memory a parameter
python -m benchmarks.fleet.swarm.meeting --sites 1 4 16 64 --parameters 1 --meetings 9 --plot docs/fleet/swarm-sites.svg
"""

import argparse
import multiprocessing
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.planner.growth import Line, save
from titan_fleet.section import Swarm
from titan_fleet.swarm.certificates import context, make
from titan_fleet.swarm.codec import num_bytes
from titan_fleet.swarm.fragments import Box, Weight, divide, held_of
from titan_fleet.swarm.identity import shared
from titan_fleet.swarm.link import Link, Travel
from torchtitan.config.schema import Whole

COLUMNS = 1024
PROCESSES = 8  # of sites
PYTHON_BYTES = 300e6  # of a syncer that holds nothing


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sites", type=int, nargs="+", default=[3], help="one measurement for each number")
    parser.add_argument("--ranks", type=int, default=1, help="of each site, with equal rows of each weight")
    parser.add_argument("--parameters", type=float, default=8.0, help="in millions")
    parser.add_argument("--fragments", type=int, default=4)
    parser.add_argument("--meetings", type=int, default=3, help="of all fragments")
    parser.add_argument("--codec", default="int8")
    parser.add_argument("--plot", type=Path, help="draw seconds over the number of sites (SVG)")
    args = parser.parse_args()
    lines: dict[str, Line] = {"last site": [], "first site": []}
    for count in args.sites:
        with tempfile.TemporaryDirectory() as folder:
            spans = measure(Path(folder), argparse.Namespace(**(vars(args) | {"sites": count})))
        for line, seconds in zip(lines.values(), spans, strict=True):
            line.append((count, seconds))
    if args.plot:
        below = f"sites that send {args.parameters:g}M parameters in {args.codec}, {args.fragments} fragments"
        save(args.plot, "seconds of a meeting of all fragments", below, lines)


def measure(folder: Path, args: argparse.Namespace) -> tuple[float, float]:
    """Median seconds of a meeting, at the last site and at the first."""
    names = [f"site-{number}" for number in range(args.sites)]
    make(folder / "keys", ["127.0.0.1"], names)
    section = Swarm(fragments=args.fragments, codec=args.codec, quorum=args.sites, sites=args.sites, every=100, delay=0)
    config = Whole.model_validate({"swarm": section.model_dump()})
    file = folder / "train.toml"
    lines = [f"{key} = {value!r}".replace("'", '"') for key, value in section.model_dump(exclude_none=True).items()]
    file.write_text("\n".join(["[swarm]", *lines]))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = ["swarm", "serve", file, "--keys", folder / "keys/syncer", "--out", folder / "syncer"]
    words = [sys.executable, "-m", "torchtitan", *words, "--host", "127.0.0.1", "--port", port]
    log = open(folder / "log", "wb")
    syncer = subprocess.Popen([*map(str, words)], stderr=log)
    try:
        return run(folder, args, names, f"https://127.0.0.1:{port}", syncer.pid, shared(config))
    except BaseException:
        print((folder / "log").read_text()[-3000:])
        raise
    finally:
        syncer.terminate()
        syncer.wait()


def run(
    folder: Path, args: argparse.Namespace, names: list[str], url: str, pid: int, said: dict[str, Any]
) -> tuple[float, float]:
    weights = [
        Weight(f"w{n:03}", (1000, COLUMNS)) for n in range(max(1, round(args.parameters * 1e6 / 1000 / COLUMNS)))
    ]
    total = sum(weight.rows * weight.columns for weight in weights)
    own = [(folder / "keys" / name, url, weights, args, said) for name in names]
    times, bytes_up = zip(*beside(site, own), strict=True)
    peak = int(re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[1]) * 1024  # type: ignore[index]
    slowest = [max(each) for each in zip(*times, strict=True)]
    seconds = statistics.median(slowest)
    sent = sum(num_bytes(weight.rows, weight.columns, args.codec) for weight in weights)
    print(
        f"{args.sites} sites of {args.ranks} ranks, {total / 1e6:.1f}M parameters, {args.codec}, {args.fragments} parts"
    )
    print(f"a meeting of all fragments: {', '.join(f'{each:.2f}' for each in slowest)} s, median {seconds:.2f}")
    fastest = statistics.median([min(each) for each in zip(*times, strict=True)])
    print(f"the first site has its meeting after {fastest:.2f} s, the last after {seconds:.2f} s")
    bare = wire(folder, args, sent)
    print(f"over plain TLS, {sent / 1e6:.1f} MB up and down a site: {bare:.2f} s, ratio {seconds / bare:.2f}")
    print(f"bytes up a parameter: {statistics.mean(bytes_up) / total / args.meetings:.4f}")
    print(
        f"the syncer's peak: {peak / 1e6:.0f} MB, {(peak - PYTHON_BYTES) / total:.1f} bytes a parameter beside Python"
    )
    return seconds, fastest


def beside(target: Callable[..., Any], calls: Sequence[Sequence[Any]]) -> list[Any]:
    """What all calls return, made at the same time: in threads of a few processes, since each process takes memory."""
    spawn = multiprocessing.get_context("spawn")
    answers: Any = spawn.Queue()
    shares = [calls[first::PROCESSES] for first in range(min(PROCESSES, len(calls)))]
    processes = [spawn.Process(target=in_threads, args=(target, share, answers)) for share in shares]
    for process in processes:
        process.start()
    got = [answers.get(timeout=900) for _ in calls]
    for process in processes:
        process.join()
    return got


def in_threads(target: Callable[..., Any], calls: Sequence[Sequence[Any]], answers: Any) -> None:
    torch.set_num_threads(1)
    threads = [threading.Thread(target=lambda own=own: answers.put(target(*own))) for own in calls]  # type: ignore[misc]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def site(
    keys: Path, url: str, weights: list[Weight], args: argparse.Namespace, said: dict[str, Any]
) -> tuple[list[float], int]:
    links = [Link(url, keys, rank) for rank in range(args.ranks)]
    told = links[0].ask("/hello", {"site": keys.name, "shared": said, "streams": 8, "place": [0, 1], "swarm": ""})
    fragments = divide(weights, args.fragments)
    step = -(-1000 // args.ranks)
    rows = [(rank * step, min(1000, (rank + 1) * step)) for rank in range(args.ranks)]
    held = [[Box(n, *row, 0, COLUMNS) for n in range(len(weights))] for row in rows]
    boxes = [[held_of(fragment, each) for fragment in fragments] for each in held]
    for link in links:
        link.run = told["run"]
    table = [[weight.name, list(weight.shape)] for weight in weights]
    joined = links[0].ask("/join", {"run": told["run"], "weights": table, "step": 0, "is_new": True})
    versions = joined["versions"]
    for link in links:
        link.session = joined["session"]
    if keys.name.endswith("-0"):
        for number in range(args.fragments):
            for rank, link in enumerate(links):
                link.found(number, boxes[rank][number], bytes(4 * sum(box.size for box in boxes[rank][number])))
    for number, link in ((number, link) for number in range(args.fragments) for link in links):
        if versions[number] < 0:
            link.fetch_anchor(number, boxes[0][number][:1])
    times, up = [], 0
    for meeting in range(args.meetings):
        begun = time.perf_counter()
        for number in range(args.fragments):
            travels = []
            for rank in range(args.ranks):
                mine = boxes[rank][number]
                body = bytes(sum(num_bytes(*box.shape, args.codec) for box in mine))
                travels.append(Travel(number, meeting, meeting + 1, 100, mine, mine, body))
            threads = [
                threading.Thread(target=link.carry, args=(travel,)) for link, travel in zip(links, travels, strict=True)
            ]
            for thread in threads:
                thread.start()
            for thread, travel in zip(threads, travels, strict=True):
                thread.join()
                if travel.failed is not None:
                    raise travel.failed
                up += travel.bytes_up
        times.append(time.perf_counter() - begun)
    return times, up


def wire(folder: Path, args: argparse.Namespace, size: int) -> float:
    """Seconds in which every site sends so many bytes, and gets as many back, a fragment at a time."""
    part = size // args.fragments
    listener = socket.create_server(("127.0.0.1", 0))
    server = context(folder / "keys/syncer", is_server=True)

    def serve() -> None:
        def answer(connection: Any) -> None:
            with server.wrap_socket(connection, server_side=True) as secured:
                for _ in range(args.fragments):
                    left = part
                    while left:
                        left -= len(secured.recv(min(left, 1 << 16)))
                    secured.sendall(bytes(part))

        for _ in range(args.sites):
            threading.Thread(target=answer, args=(listener.accept()[0],), daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    spans = beside(send, [(folder / "keys/site-0", listener.getsockname()[1], part, args.fragments)] * args.sites)
    return max(end for _, end in spans) - min(begin for begin, _ in spans)


def send(keys: Path, port: int, part: int, fragments: int) -> tuple[float, float]:
    connection = socket.create_connection(("127.0.0.1", port))
    with context(keys, is_server=False).wrap_socket(connection, server_hostname="127.0.0.1") as secured:
        begun = time.monotonic()
        for _ in range(fragments):
            secured.sendall(bytes(part))
            left = part
            while left:
                left -= len(secured.recv(min(left, 1 << 16)))
        return begun, time.monotonic()


if __name__ == "__main__":
    main()
