"""Throughput of reach's ways beside WireGuard alone, between namespaces of this machine; needs root.

    sudo .venv/bin/python -m benchmarks.fleet.reach

zurich has no router, lima stands behind one. A second WireGuard between the two, set up by hand, is the reference; both
carry one TCP stream in turns. oslo - lima is relayed over UDP, quito - lima goes inside TLS.
"""

import argparse
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from titan_fleet.swarm.certificates import make

PORT, SECONDS = 29800, 1.0
ALONE = {"zurich": "10.99.0.1", "lima": "10.99.0.2"}


def receive(address: str) -> None:
    with socket.create_server((address, PORT)) as listener:
        print("listens", flush=True)
        connection, _ = listener.accept()
        buffer, begin, total = bytearray(1 << 18), time.perf_counter(), 0
        while count := connection.recv_into(buffer):
            total += count
        print(8e-6 * total / (time.perf_counter() - begin))


def send(address: str) -> None:
    with socket.create_connection((address, PORT), timeout=20) as connection:
        block, end = bytes(1 << 18), time.perf_counter() + SECONDS
        while time.perf_counter() < end:
            connection.sendall(block)


def megabits(world: Any, sender: str, receiver: str, address: str) -> float:
    words = [sys.executable, "-m", "benchmarks.fleet.reach"]
    with subprocess.Popen(
        world.words(receiver, [*words, "--receive", address]), stdout=subprocess.PIPE, text=True
    ) as end:
        assert end.stdout and end.stdout.readline() == "listens\n"
        world.run(sender, *words, "--send", address)
        return float(end.stdout.readline())


def alone(world: Any) -> None:
    """WireGuard between zurich and lima, by hand: lima writes first, for zurich cannot."""
    keys = {}
    for node, address in ALONE.items():
        if subprocess.run(
            world.words(node, "ip link add alone type wireguard".split()), capture_output=True
        ).returncode:
            world.run(node, "setsid", "wireguard-go", "alone")  # a session is a group to the scheduler; reach's has one
        made = (
            "umask 077; wg genkey > /run/wireguard/key; wg set alone listen-port 51999 private-key /run/wireguard/key"
        )
        world.run(node, "sh", "-c", f"{made}; ip address add {address}/24 dev alone; ip link set alone mtu 1420 up")
        keys[node] = world.run(node, "sh", "-c", "wg pubkey < /run/wireguard/key; rm /run/wireguard/key").strip()
    world.run("zurich", "wg", "set", "alone", "peer", keys["lima"], "allowed-ips", "10.99.0.2/32")
    to = "endpoint 198.51.100.21:51999 allowed-ips 10.99.0.1/32 persistent-keepalive 25".split()
    world.run("lima", "wg", "set", "alone", "peer", keys["zurich"], *to)
    world.run("lima", "ping", "-c3", "10.99.0.1")


def compare(rounds: int) -> None:
    from tests.fleet.reach.world import ADDRESS, World

    world = World()
    try:
        folder = Path(tempfile.mkdtemp())
        make(folder / "keys", ["198.51.100.10"], list(ADDRESS))
        world.serve(folder / "keys", folder / "meet.log")
        time.sleep(3)
        nodes = ("zurich", "lima", "oslo", "quito")
        for node in nodes:
            world.join(node, folder / "keys", folder / f"{node}.log")
        while not all("written" in (folder / f"{node}.log").read_text() for node in nodes):
            time.sleep(1)
        alone(world)
        ways = {
            "WireGuard alone, zurich - lima": ("lima", "zurich", ALONE["zurich"]),
            "reach, direct, zurich - lima": ("lima", "zurich", ADDRESS["zurich"]),
            "reach, relayed over UDP, oslo - lima": ("oslo", "lima", ADDRESS["lima"]),
            "reach, inside TLS, quito - lima": ("quito", "lima", ADDRESS["lima"]),
        }
        found: dict[str, list[float]] = {way: [] for way in ways}
        for number in range(rounds):  # there and back again, for a machine that others use, too
            for way, (sender, receiver, address) in list(ways.items())[:: 1 if number % 2 else -1]:
                if number % 4 == 0 or receiver == "zurich":
                    found[way].append(megabits(world, sender, receiver, address))
        first = next(iter(found.values()))
        for way, rates in found.items():
            reference = first if len(rates) == rounds else first[::4]
            share = statistics.median(rate / other for rate, other in zip(rates, reference, strict=True))
            spread = f"({min(rates):.0f} to {max(rates):.0f})"
            print(f"{way:40} {statistics.median(rates):7.0f} Mbit/s {spread}, {share:.2f} of the first in its round")
    finally:
        world.stop()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--receive")
    parser.add_argument("--send")
    args = parser.parse_args()
    if args.receive:
        receive(args.receive)
    elif args.send:
        send(args.send)
    else:
        compare(args.rounds)
