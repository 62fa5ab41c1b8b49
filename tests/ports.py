"""Ports for servers of tests, below those that the system gives away: nobody gets one by chance before its server."""

import itertools
import os
import socket

_EACH = 2000  # ports of a process of pytest-xdist
_taken = itertools.count(os.getpid())


def free_port() -> int:
    first = 20000 + _EACH * (int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 6)
    for number in itertools.islice(_taken, _EACH):
        port = first + number % _EACH
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", port))
            except OSError:
                continue
        return port
    raise AssertionError(f"no port from {first} to {first + _EACH - 1} is free")
