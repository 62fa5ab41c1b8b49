"""What the serving machine passes on: WireGuard's datagrams of a pair, from one leg to the other.

A leg is a UDP address, or the connection of a node without UDP.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable
from functools import partial
from typing import Any

from titan_fleet.reach import messages
from titan_fleet.reach.messages import frame, read_frame
from titan_fleet.reach.routers import Endpoint

_CARRY_SECONDS = 60.0  # without a frame; the nodes ask each other every 2 s
_MOST_BUFFERED = 1 << 20  # bytes that wait for one leg; what comes then is dropped, as a full queue does

Take = Callable[["Socket", bytes, Endpoint], None]
TakeBind = Callable[[bytes], tuple[int, bytes] | None]  # a node's number, and the answer to its question


class Socket(asyncio.DatagramProtocol):
    """A UDP socket whose datagrams go to a function."""

    def __init__(self, take: Take) -> None:
        self._take = take

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.address, self.port = transport.get_extra_info("sockname")[:2]

    def datagram_received(self, data: bytes, address: Any) -> None:
        self._take(self, data, address[:2])

    @staticmethod
    async def open(take: Take, address: str, port: int) -> "Socket":
        loop = asyncio.get_running_loop()
        _, made = await loop.create_datagram_endpoint(lambda: Socket(take), local_addr=(address, port))
        return made


class Relay:
    """A pair."""

    def __init__(self, numbers: tuple[int, int]) -> None:
        self.numbers = numbers
        self.legs: dict[int, Callable[[bytes], None]] = {}
        self.senders: dict[Endpoint, int] = {}
        self.sockets: dict[str, Socket] = {}

    def bind(self, number: int, socket: Socket, to: Endpoint) -> None:
        def send(data: bytes) -> None:
            if socket.transport.get_write_buffer_size() < _MOST_BUFFERED:
                socket.transport.sendto(data, to)

        self.drop(number)
        self.senders[to], self.legs[number] = number, send

    def drop(self, number: int) -> None:
        self.legs.pop(number, None)
        self.senders = {at: each for at, each in self.senders.items() if each != number}

    def take(self, number: int, data: bytes) -> None:
        one, other = self.numbers
        if leg := self.legs.get(other if number == one else one):
            leg(data)


class Relays:
    """All pairs. Each has a UDP port of its own, at every address of this machine."""

    def __init__(self, first_port: int, take_bind: TakeBind) -> None:
        self._first_port, self._take_bind = first_port, take_bind
        self._pairs: dict[tuple[int, int], Relay] = {}
        self._opening, self._failed = asyncio.Lock(), set[Endpoint]()

    def of(self, one: int, other: int) -> Relay:
        if one == other:
            raise ValueError("a node is no pair")
        numbers = min(one, other), max(one, other)
        return self._pairs.setdefault(numbers, Relay(numbers))

    async def open(self, relay: Relay, addresses: Iterable[str]) -> int | None:
        """The pair's port; None if it cannot be had."""
        low, high = relay.numbers
        port = self._first_port + (high - 1) * (high - 2) // 2 + low - 1

        def take(socket: Socket, data: bytes, origin: Endpoint) -> None:
            if (number := relay.senders.get(origin)) is not None and data[:4] != messages.MAGIC:
                relay.take(number, data)
            elif (bound := self._take_bind(data)) and bound[0] in relay.numbers:
                relay.bind(bound[0], socket, origin)
                socket.transport.sendto(bound[1], origin)

        async with self._opening:  # both nodes of a pair ask
            for address in {*addresses} - {*relay.sockets}:
                try:
                    relay.sockets[address] = await Socket.open(take, address, port)
                except OSError as error:  # perhaps of an address that is gone
                    if (address, port) not in self._failed:
                        self._failed.add((address, port))
                        print(f"error: {address} UDP port {port}, nodes {low} and {high}: {error.strerror}", flush=True)
        return port if relay.sockets else None

    async def carry(
        self, own: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, is_known: Callable[[int], bool]
    ) -> None:
        """A node without UDP: frames of its connection, each with the number of the other node before a datagram."""
        legs: dict[int, Callable[[bytes], None]] = {}
        try:
            async for body in frames(reader, writer):
                number, data = int.from_bytes(body[:2], "big"), body[2:]
                if number not in legs and not is_known(number):
                    return
                relay = self.of(own, number)
                relay.legs[own] = legs.setdefault(number, partial(_carry_on, writer, number))  # also after some UDP
                if data:  # else it only says where it is
                    relay.take(own, data)
        finally:
            for number, leg in legs.items():
                if self.of(own, number).legs.get(own) is leg:
                    del self.of(own, number).legs[own]

    def drop(self, number: int) -> None:
        """Nothing is passed on to or from this node until it binds again."""
        for relay in self._pairs.values():
            if number in relay.numbers:
                relay.drop(number)

    def close(self) -> None:
        for relay in self._pairs.values():
            for socket in relay.sockets.values():
                socket.transport.close()


def _carry_on(writer: asyncio.StreamWriter, number: int, data: bytes) -> None:
    write(writer, frame(number.to_bytes(2, "big") + data))


async def frames(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> AsyncIterator[bytes]:
    """Of a connection that carries, which is given up after a minute without one. (A `wait_for` for each packet would
    be slow, and Python 3.11's may take a cancellation for the packet's.)"""
    heard = time.monotonic()

    async def give_up() -> None:
        while time.monotonic() < heard + _CARRY_SECONDS:
            await asyncio.sleep(_CARRY_SECONDS / 4)
        writer.transport.abort()

    watching = asyncio.create_task(give_up())
    try:
        while body := await read_frame(reader):
            heard = time.monotonic()
            yield body
    finally:
        watching.cancel()


def write(writer: asyncio.StreamWriter, data: bytes) -> None:
    """Sent, or dropped where too much waits already."""
    if not writer.is_closing() and writer.transport.get_write_buffer_size() < _MOST_BUFFERED:
        writer.write(data)
