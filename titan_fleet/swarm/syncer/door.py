"""Who may connect to a syncer, and how often: strangers a little and not for long, each site its share.

The bounds follow from how many descriptors this process may open, so that it never runs out of them.
"""

import asyncio
import functools
import os
import resource
import socket
import time
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.h11_impl import H11Protocol

from titan_fleet.swarm.certificates import context, named
from torchtitan.observe.log import logger
from torchtitan.refusal import Refusal

HANDSHAKE_SECONDS = 20.0  # until a certificate is shown
MOST_DESCRIPTORS = 8192  # that a syncer asks for
_FOR_FILES, _MOST_WAITING = 64, 256
_QUIET_SECONDS = 60.0


class Seldom:
    """Whether to log a thing that others can cause as often as they like."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self._last = seconds, dict[str, float]()

    def may(self, key: str = "") -> bool:
        now = time.monotonic()
        if now - self._last.get(key, -self.seconds) < self.seconds:
            return False
        self._last[key] = now
        return True


class _Named(H11Protocol):
    """Tells the application whose certificate a connection has; a site has at most `most` at once."""

    def __init__(self, *, most: int, in_all: int, logs: Seldom, **others: Any) -> None:
        super().__init__(**others)
        self.most, self.in_all, self.logs, self.site = most, in_all, logs, ""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        peer = transport.get_extra_info("ssl_object").getpeercert()
        self.site, serial = named(peer)
        self.app_state = {**self.app_state, "site": self.site, "serial": serial}
        held = sum(isinstance(each, _Named) and each.site == self.site for each in self.connections)
        if held > self.most or len(self.connections) > self.in_all:
            if self.logs.may(self.site):
                logger.warning(
                    f"site {self.site} has {held} connections, and {self.most} are the most of a site: further ones "
                    "are closed; raise ulimit -n for the syncer if the site has so many ranks"
                )
            transport.abort()


class Door(uvicorn.Server):
    """Takes connections one by one, and gives them to the application once they have shown a certificate.

    Those that have not are bounded by address and in all. The oldest one makes room for a new one, so whoever has a
    certificate gets through while others hold theirs.
    """

    def __init__(self, app: Starlette, keys: Path, host: str, port: int, sites: int) -> None:
        free = resource.getrlimit(resource.RLIMIT_NOFILE)[0] - len(os.listdir("/dev/fd")) - _FOR_FILES
        self.most_waiting = max(4, min(_MOST_WAITING, free // 4))
        self.most_of_address = max(1, self.most_waiting // 4)
        in_all = max(sites, free - self.most_waiting)
        self.tls, self.logs = context(keys, is_server=True), Seldom(_QUIET_SECONDS)
        self.waiting: dict[asyncio.Task[Any], str] = {}  # connections without a certificate -> address, oldest first
        try:
            kind = socket.AF_INET6 if ":" in host else socket.AF_INET
            self.listener = socket.create_server((host, port), family=kind, backlog=1024)
        except OSError as error:
            raise Refusal(f"{host} port {port} cannot be used: {error.strerror}; give another --port") from None
        self.listener.setblocking(False)
        self.listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # what it accepts has this, too
        named: Any = functools.partial(_Named, most=in_all // sites, in_all=in_all, logs=self.logs)
        config = uvicorn.Config(
            app,
            loop="asyncio",  # what was measured; uvloop may be there for another program
            http=named,
            ws="none",
            log_level="error",
            timeout_keep_alive=75,
        )
        super().__init__(config)

    @property
    def port(self) -> int:
        port: int = self.listener.getsockname()[1]
        return port

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=[])
        self.accepting = asyncio.create_task(self._accept())

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for task in (self.accepting, *self.waiting):
            task.cancel()
        self.listener.close()
        await super().shutdown(sockets)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                taken, peer = await loop.sock_accept(self.listener)
            except OSError as error:  # the system has no more descriptors, say
                if self.logs.may("accept"):
                    logger.error(f"no connection can be taken ({error.strerror}); this is tried again each second")
                await asyncio.sleep(1)
            else:
                self._make_room(peer[0])
                self._greet(taken, peer[0])
                await asyncio.sleep(0)  # sock_accept does not wait if a connection is there: now what was closed closes

    def _make_room(self, address: str) -> None:
        own = [task for task, other in self.waiting.items() if other == address]
        if len(own) < self.most_of_address and len(self.waiting) < self.most_waiting:
            return
        oldest = own[0] if len(own) >= self.most_of_address else next(iter(self.waiting))
        if self.logs.may("waiting"):
            logger.warning(
                f"{len(self.waiting)} connections show no certificate, {len(own)} of them from {address}: each further "
                f"one closes an older one (logged once in {_QUIET_SECONDS:.0f} s)"
            )
        del self.waiting[oldest]
        oldest.cancel()

    def _greet(self, taken: socket.socket, address: str) -> None:
        def protocol() -> asyncio.Protocol:
            made: Any = self.config.http_protocol_class
            own: asyncio.Protocol = made(
                config=self.config, server_state=self.server_state, app_state=self.lifespan.state
            )
            return own

        def ended(task: asyncio.Task[Any]) -> None:
            self.waiting.pop(task, None)
            error = None if task.cancelled() else task.exception()
            if task.cancelled() or error is not None:
                taken.close()
            if error is not None and not isinstance(error, OSError):  # OSError: it has hung up, or has no certificate
                logger.error(f"a connection from {address} failed: {type(error).__name__}: {error}")

        greeting = asyncio.get_running_loop().connect_accepted_socket(
            protocol, taken, ssl=self.tls, ssl_handshake_timeout=HANDSHAKE_SECONDS
        )
        task = asyncio.get_running_loop().create_task(greeting)
        self.waiting[task] = address
        task.add_done_callback(ended)
