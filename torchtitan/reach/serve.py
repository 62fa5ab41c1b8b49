"""Serve a network: the machine that all nodes can call. They meet here, see how they look from outside, and are relayed
here if they cannot reach each other. It needs no root and no WireGuard, and keeps nothing.

    python -m torchtitan swarm keys --syncer meet.example.org --sites zurich,lima
    python -m torchtitan reach serve --keys keys/syncer

Open TCP and UDP at --port, UDP at the next one, and UDP at one more for each pair of nodes that is relayed.
"""

import argparse
import asyncio
from collections.abc import Sequence
from pathlib import Path

from torchtitan.swarm.join import require_packages

HELP = "let nodes behind routers meet here, for a network between them"
PORT = 29710


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--keys", default="keys/syncer", help="the syncer's folder of swarm keys (%(default)s)")
    parser.add_argument("--port", type=int, default=PORT, help="the first port (%(default)s)")
    parser.add_argument("--network", default="10.88.0.0/24", help="the nodes' addresses (%(default)s)")
    parser.add_argument("--second_address", help="another address of this machine, to tell kinds of routers apart")


def run(args: argparse.Namespace, _: Sequence[str]) -> None:
    require_packages()
    from torchtitan.reach.server import Server

    keys = Path(args.keys)
    keys = keys / "syncer" if (keys / "syncer").is_dir() else keys
    server = Server(keys, args.network, args.port, args.second_address)

    async def serve() -> None:
        async with await server.serve() as serving:
            print(f"nodes may come to port {args.port}", flush=True)
            await serving.serve_forever()

    try:
        asyncio.run(serve())
    except KeyboardInterrupt:
        print("the serving machine ends; direct ways stay up", flush=True)
