"""The way of a node whose network lets no UDP out: WireGuard's packets, as they are, inside TLS to the serving machine.

WireGuard sends each of these peers' packets to a port of this machine's loopback.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from titan_fleet.reach.messages import as_frame, frame, read_message, within
from titan_fleet.reach.relays import Socket, frames, write

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Carrier:
    def __init__(self, connect: Callable[[], Awaitable[Streams]], port: int) -> None:
        self._connect, self._to = connect, ("127.0.0.1", port)
        self._sockets: dict[int, Socket] = {}
        self._writer: asyncio.StreamWriter | None = None
        self._task: asyncio.Task[None] | None = None

    async def endpoint(self, number: int) -> str:
        """Where WireGuard finds this peer."""
        if self._task is None:
            self._task = asyncio.create_task(self._run())
        if number not in self._sockets:
            self._sockets[number] = await Socket.open(lambda _, data, __: self._send(number, data), "127.0.0.1", 0)
            self._send(number, b"")
        return f"127.0.0.1:{self._sockets[number].port}"

    def _send(self, number: int, data: bytes) -> None:
        if self._writer:
            write(self._writer, frame(number.to_bytes(2, "big") + data))

    async def _run(self) -> None:
        while True:
            with contextlib.suppress(OSError, EOFError, asyncio.TimeoutError):
                reader, self._writer = await self._connect()
                try:
                    self._writer.write(as_frame({"do": "carry"}))
                    await within(10, read_message(reader))
                    for number in self._sockets:
                        self._send(number, b"")
                    async for body in frames(reader, self._writer):
                        if own := self._sockets.get(int.from_bytes(body[:2], "big")):
                            own.transport.sendto(body[2:], self._to)
                finally:
                    self._writer.close()
            await asyncio.sleep(1)

    def meet_again(self) -> None:
        """The connection may be dead without a sign, for instance after this node's address changed."""
        if self._writer:
            self._writer.transport.abort()

    def close(self) -> None:
        if self._task:
            self._task.cancel()
        for each in self._sockets.values():
            each.transport.close()
