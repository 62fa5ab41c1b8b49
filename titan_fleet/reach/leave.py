"""Leave a network of `reach join`: end it, or remove what a killed one has left.

sudo python -m torchtitan reach leave
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchtitan.refusal import Refusal
from torchtitan.whole_file import write_whole

HELP = "leave the network of `reach join`, and remove what it made"
_FOLDER = Path("/run/wireguard")  # where wireguard-go has its sockets, too
_SECONDS = 15.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--interface", default="reach0", help="name of the network's interface (%(default)s)")


def run(args: argparse.Namespace, _: Sequence[str]) -> None:
    if not leave(args.interface):
        raise Refusal(f"no network of reach is up at {args.interface}; if it has another name, give --interface")
    print(f"{args.interface} is gone")


def state_file(interface: str) -> Path:
    return _FOLDER / f"{interface}.reach.json"


def write_state(interface: str, state: dict[str, Any]) -> None:
    """Who keeps this interface, and which ways it has. No key is in it."""
    _FOLDER.mkdir(mode=0o700, exist_ok=True)
    write_whole(state_file(interface), json.dumps({"pid": os.getpid()} | state, indent=1))


def keeper(interface: str) -> int | None:
    """The process of `reach join` that keeps this interface, if it runs."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        pid = int(json.loads(state_file(interface).read_text())["pid"])
        if pid != os.getpid() and b"reach" in Path(f"/proc/{pid}/cmdline").read_bytes():
            return pid
    return None


def leave(interface: str) -> bool:
    """Whether there was anything to remove."""
    file, end = state_file(interface), time.monotonic() + _SECONDS
    if not file.exists():
        return False
    if (pid := keeper(interface)) is not None:
        os.kill(pid, signal.SIGTERM)
        while keeper(interface) is not None and time.monotonic() < end:
            time.sleep(0.1)
    subprocess.run(["ip", "link", "delete", interface], capture_output=True)  # a killed join leaves it
    file.unlink(missing_ok=True)
    return True
