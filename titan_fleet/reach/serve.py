"""Serve a network: the machine that all nodes can call. They meet here, see how they look from outside, and are relayed
here if they cannot reach each other. It needs no root and no WireGuard, and keeps nothing.

    python -m torchtitan swarm keys --syncer meet.example.org --sites zurich,lima
    python -m torchtitan reach serve --keys keys/syncer

Open TCP and UDP at --port, UDP at the next one, and UDP at one more for each pair of nodes that is relayed.
"""

import argparse
import asyncio
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

from titan_fleet.swarm.join import require_packages
from torchtitan.refusal import Refusal

HELP = "let nodes behind routers meet here, for a network between them"
PORT = 29710


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--keys", default="keys/syncer", help="the syncer's folder of swarm keys (%(default)s)")
    parser.add_argument("--port", type=int, default=PORT, help="the first port (%(default)s)")
    parser.add_argument("--network", default="10.88.0.0/24", help="the nodes' addresses (%(default)s)")
    parser.add_argument("--second_address", help="another address of this machine, to tell kinds of routers apart")
    parser.add_argument(
        "--through",
        default="",
        metavar="SITE",
        help="a node that passes on what has no direct way, instead of this one",
    )


def run(args: argparse.Namespace, _: Sequence[str]) -> None:
    require_packages()
    from titan_fleet.reach.server import Server
    from titan_fleet.swarm.certificates import sites_of

    keys = Path(args.keys)
    keys = keys / "syncer" if (keys / "syncer").is_dir() else keys
    if args.through and args.through not in sites_of(keys):
        raise Refusal(f"--through {args.through} is no site of {keys}; use one of {', '.join(sites_of(keys))}")
    server = Server(keys, args.network, args.port, args.second_address, args.through)

    async def serve() -> None:
        stop = asyncio.Event()
        end_by_signals(stop.set)
        async with server.serving():
            print(f"nodes may come to port {args.port}", flush=True)
            await stop.wait()

    asyncio.run(serve())
    print("the serving machine ends; direct ways stay up", flush=True)


def end_by_signals(stop: Callable[[], None]) -> None:
    """Ctrl-C, a kill and a closed terminal call `stop`; under nohup, a closed terminal does not."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            asyncio.get_running_loop().add_signal_handler(number, stop)
