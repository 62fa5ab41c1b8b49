"""Join a network of nodes behind routers, as root: finds ways to the others, brings WireGuard up, and measures it.

    sudo python -m torchtitan reach join meet.example.org --keys keys/zurich

It runs for as long as the network shall be up. Ctrl-C, or `reach leave`, removes everything that it made.
"""

import argparse
import asyncio
import os
from collections.abc import Sequence
from pathlib import Path

from titan_fleet.reach.serve import PORT, end_by_signals
from titan_fleet.swarm.join import require_packages
from torchtitan.refusal import Refusal

HELP = "build a network to the other nodes, through routers, and keep it up"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("host", help="the machine of `reach serve`, as HOST or HOST:PORT")
    parser.add_argument("--keys", required=True, help="this node's folder of swarm keys")
    parser.add_argument("--interface", default="reach0", help="name of the network's interface (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("reach"), help="for cluster.toml and nodes.toml (%(default)s)")
    parser.add_argument("--listen", type=int, default=51820, help="WireGuard's UDP port here (%(default)s)")


def run(args: argparse.Namespace, _: Sequence[str]) -> None:
    require_packages()
    if os.geteuid() != 0:
        raise Refusal("reach join makes a network interface, which only root can; start it with sudo")
    from titan_fleet.reach import wireguard
    from titan_fleet.reach.leave import keeper, leave
    from titan_fleet.reach.node import Node

    wireguard.require_programs()
    if (pid := keeper(args.interface)) is not None:
        raise Refusal(f"process {pid} keeps {args.interface} up; `reach leave` ends it, or give another --interface")
    leave(args.interface)  # what a killed one has left
    host, port = args.host, PORT
    if host.startswith("[") or host.count(":") == 1:  # else an address of IPv6, without a port
        host, _, given = host.rpartition(":") if not host.endswith("]") else (host, "", str(PORT))
        if not given.isdecimal() or not 0 < int(given) < 2**16:
            raise Refusal(f"{args.host}: {given!r} is no port; write HOST:PORT, or [ADDRESS]:PORT for IPv6")
        host, port = host.strip("[]"), int(given)

    async def join() -> None:
        node = Node(Path(args.keys), host, port, args.interface, args.listen, args.out)
        end_by_signals(node.stop.set)
        await node.run()

    asyncio.run(join())
