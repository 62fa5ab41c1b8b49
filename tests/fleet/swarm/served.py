"""A syncer in a thread of the test, and its keys."""

import contextlib
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from titan_fleet.swarm.certificates import make, sites_of
from titan_fleet.swarm.syncer.server import Server
from titan_fleet.swarm.syncer.syncer import Syncer
from torchtitan.config.keys.swarm import Swarm


def keys(folder: Path, sites: int) -> Path:
    make(folder / "keys", ["127.0.0.1"], [f"site-{n}" for n in range(sites)])
    return folder / "keys"


@contextlib.contextmanager
def served(
    folder: Path, section: Swarm, shared: Mapping[str, Any], seed: int = 0, out: str = "syncer"
) -> Iterator[tuple[str, Syncer]]:
    """Its address, and what is behind it. The folder also has the keys."""
    syncer = Syncer(folder / out, section, shared, seed, lambda: sites_of(folder / "keys/syncer"))
    server = Server(syncer, folder / "keys/syncer").build("127.0.0.1", 0)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        yield f"https://127.0.0.1:{server.port}", syncer
    finally:
        server.should_exit = server.force_exit = True
        thread.join(20)
