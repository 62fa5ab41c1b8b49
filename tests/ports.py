"""Ports for servers of tests, below those that the system gives away, and held: nobody gets one before its server."""

import itertools
import os
import socket

_EACH = 2000  # ports of a process of pytest-xdist
_taken = itertools.count(os.getpid())
_held: list[socket.socket] = []


def free_port() -> int:
    """A port on which this process has a socket that does not listen, so that a server that reuses addresses can."""
    first = 20000 + _EACH * (int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 6)
    for number in itertools.islice(_taken, _EACH):
        holder = socket.socket()
        try:
            holder.bind(("", first + number % _EACH))  # alone: it may not reuse what another holds
        except OSError:
            holder.close()
            continue
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _held.append(holder)
        return holder.getsockname()[1]
    raise AssertionError(f"no port from {first} to {first + _EACH - 1} is free")
