"""The serving machine: nodes meet here over mutual TLS, learn how they look from outside, and are relayed if need be.

It knows names, WireGuard's public keys and addresses. What it relays is WireGuard's, which it cannot read. It keeps
nothing on its disk, answers no stranger, and needs no root.
"""

import asyncio
import contextlib
import hmac
import ipaddress
import itertools
import json
import secrets
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchtitan.launch.addresses import is_local, own_addresses
from torchtitan.reach import messages
from torchtitan.reach.messages import as_frame, frame, read_frame, read_message
from torchtitan.refusal import Refusal
from torchtitan.swarm.certificates import REVOKED, context, sites_of

_HELLO_SECONDS, SILENT_SECONDS = 10.0, 10.0
_LATER_SECONDS, _MOST_LATER, _MOST_CANDIDATES = 600, 16, 12
_MOST_BUFFERED = 1 << 20  # bytes that wait for one connection; what comes then is dropped, as a full queue does
FIRST_PAIR = 2  # ports of pairs begin so far above --port

Take = Callable[["Socket", bytes, tuple[str, int]], None]


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


@dataclass
class Node:
    """A node that is here."""

    name: str
    number: int
    writer: asyncio.StreamWriter
    at: str  # the address of this machine that it called
    session: bytes = field(default_factory=lambda: secrets.token_bytes(messages.SESSION_BYTES))
    key: bytes = field(default_factory=lambda: secrets.token_bytes(32))
    fresh: messages.Fresh = field(default_factory=messages.Fresh)
    ways: dict[str, str] = field(default_factory=dict)  # to other nodes, as it says
    num_later: int = 0
    said: dict[str, Any] = field(default_factory=dict)
    told_through: dict[str, bool] = field(default_factory=dict)

    def tell(self, **message: Any) -> None:
        _write(self.writer, as_frame(message))


class Relay:
    """Passes a pair's datagrams from one leg to the other: a UDP address, or a connection."""

    def __init__(self, numbers: tuple[int, int]) -> None:
        self.numbers = numbers
        self.legs: dict[int, Callable[[bytes], None]] = {}
        self.senders: dict[tuple[str, int], int] = {}
        self.sockets: dict[str, Socket] = {}

    def bind(self, number: int, socket: Socket, to: tuple[str, int]) -> None:
        self.senders = {at: each for at, each in self.senders.items() if each != number} | {to: number}
        self.legs[number] = lambda data: socket.transport.sendto(data, to)

    def take(self, number: int, data: bytes) -> None:
        one, other = self.numbers
        if leg := self.legs.get(other if number == one else one):
            leg(data)


class Server:
    def __init__(self, keys: Path, network: str, port: int, second: str | None = None, through: str = "") -> None:
        self.keys, self.port, self.second, self.through = keys, port, second, through
        self.network = ipaddress.IPv4Network(network)
        self.nodes: dict[str, Node] = {}
        self.sessions: dict[bytes, Node] = {}
        self.relays: dict[tuple[int, int], Relay] = {}
        self._asked: dict[tuple[str, int], Socket] = {}
        self._secret = secrets.token_bytes(32)
        self._open_connections = 0

    @contextlib.asynccontextmanager
    async def serving(self, host: str | None = None) -> AsyncIterator[None]:
        made, server = context(self.keys, is_server=True), None
        try:
            for address in [*own_addresses(), *([self.second] if self.second else [])]:
                if not is_local(address):
                    await self._open(address)
            server = await asyncio.start_server(self._connected, host, self.port, ssl=made, ssl_handshake_timeout=10)
            yield
        finally:
            if server:
                server.close()
            for node in self.nodes.values():
                node.writer.close()
            for each in [*self._asked.values(), *(s for relay in self.relays.values() for s in relay.sockets.values())]:
                each.transport.close()

    async def _open(self, address: str) -> None:
        for port in (self.port, self.port + 1):
            if (address, port) not in self._asked:
                try:
                    self._asked[address, port] = await Socket.open(self._answer, address, port)
                except OSError as error:
                    raise Refusal(
                        f"{address} port {port} cannot be used: {error.strerror}; give another --port"
                    ) from None

    # --- connections

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        node: Node | None = None
        self._open_connections += 1
        try:
            if self._open_connections > 4 * len(sites_of(self.keys)) + 16:
                return
            peer: Any = writer.get_extra_info("peercert")
            name = next(value for part in peer["subject"] for key, value in part if key == "commonName")
            self._refuse_revoked(peer["serialNumber"], name)
            hello = await asyncio.wait_for(read_message(reader), _HELLO_SECONDS)
            if hello.get("do") == "carry":
                await self._carry(self.nodes[name], reader, writer)
            elif hello.get("do") == "join":
                node = await self._welcome(name, hello, writer)
                while message := await asyncio.wait_for(read_message(reader), SILENT_SECONDS):
                    self._refuse_revoked(peer["serialNumber"], name)
                    await self._obey(node, message)
        except Refusal as refusal:
            if node is not None:  # it was revoked while it was here
                self._say_left(node)
            _write(writer, as_frame({"do": "refuse", "why": str(refusal)}))
            print(f"refused: {refusal}", flush=True)
        except (OSError, EOFError, asyncio.TimeoutError, KeyError, TypeError, ValueError):
            pass  # it hung up, or is no node of ours: whoever it is learns nothing
        finally:
            self._open_connections -= 1
            if node is not None:
                self._forget(node)
            with contextlib.suppress(OSError):
                writer.close()

    def _refuse_revoked(self, serial: str, name: str) -> None:
        file = self.keys / REVOKED
        if file.exists() and f"{int(serial, 16):x}" in json.loads(file.read_text()):
            raise Refusal(f"the certificate of {name} is revoked")

    async def _welcome(self, name: str, hello: dict[str, Any], writer: asyncio.StreamWriter) -> Node:
        sites = sites_of(self.keys)
        if name not in sites:
            raise Refusal(f"{name} is not in sites.json of the serving machine; copy keys/syncer there again")
        number, at = sites.index(name) + 1, writer.get_extra_info("sockname")[0]
        if number >= self.network.num_addresses - 1:
            raise Refusal(f"--network {self.network} has no address for node {number}; give a larger one")
        await self._open(at)
        for other in self.nodes.values():
            other.told_through.pop(name, None)
        if old := self.nodes.get(name):
            self._forget(old)
            old.writer.close()
        proof = {key: str(hello[key]) for key in ("public", "signature", "certificate")}
        node = Node(name, number, writer, at, said={"proof": proof})
        self.nodes[name], self.sessions[node.session] = node, node
        about = {"session": node.session.hex(), "key": node.key.hex(), "port": self.port, "second": self.second}
        about["through"] = self.through
        address, prefix = str(self.network[number]), self.network.prefixlen
        node.tell(do="welcome", name=name, address=address, prefix=prefix, number=number, sites=len(sites), **about)
        print(f"{name} is here, from {writer.get_extra_info('peername')[0]}", flush=True)
        return node

    def _forget(self, node: Node) -> None:
        self.sessions.pop(node.session, None)
        if self.nodes.get(node.name) is node:
            del self.nodes[node.name]
            print(f"{node.name} is away", flush=True)

    async def _obey(self, node: Node, message: dict[str, Any]) -> None:
        match message["do"]:
            case "beat":
                node.tell(do="beat")
            case "here":
                candidates = [
                    [str(ipaddress.ip_address(a)), int(p)] for a, p in message["candidates"][:_MOST_CANDIDATES]
                ]
                node.said |= {"candidates": candidates, "router": dict(message["router"])}
                for other in list(self.nodes.values()):
                    if other is not node and "router" in other.said:
                        self._introduce(node, other)
            case "relay":
                number = sites_of(self.keys).index(message["peer"]) + 1
                node.tell(do="relay", peer=message["peer"], port=await self._relay_port(node, number))
            case "way":
                node.ways[str(message["peer"])] = str(message["way"])
                self._send_through()
            case "leave":
                self._say_left(node)

    def _say_left(self, node: Node) -> None:
        for other in self.nodes.values():
            if other is not node:
                other.tell(do="left", peer=node.name)

    def _introduce(self, one: Node, other: Node) -> None:
        """Both learn of each other at the same time, for both must begin to write then."""
        sessions = b"".join(sorted((one.session, other.session)))
        key = hmac.digest(self._secret, sessions, "sha256")
        for to, about in ((one, other), (other, one)):
            address = str(self.network[about.number])
            to.tell(do="peer", name=about.name, number=about.number, address=address, key=key.hex(), **about.said)

    def _send_through(self) -> None:
        """Pairs that have no direct way may go through the chosen node, if both have one to it."""
        for one, other in itertools.permutations(self.nodes.values(), 2):
            to_it = all(node.ways.get(self.through) == "direct" for node in (one, other))
            on = to_it and "direct" not in (one.ways.get(other.name, "direct"), other.ways.get(one.name, "direct"))
            if one.told_through.get(other.name, False) != on:
                one.told_through[other.name] = on
                one.tell(do="through", peer=other.name, on=on)

    # --- datagrams

    def _open_question(self, data: bytes) -> tuple[Node, messages.Datagram] | None:
        """A question of a node that is here, and that has not been asked before."""
        found = messages.unseal(data, lambda session: node.key if (node := self.sessions.get(session)) else None)
        if found is None or len(data) < messages.QUESTION:
            return None
        node = self.sessions[found.session]
        return (node, found) if node.fresh.take(found.counter) else None

    def _answer(self, socket: Socket, data: bytes, origin: tuple[str, int]) -> None:
        if (asked := self._open_question(data)) is None:
            return
        (node, question), by = asked, socket
        if question.kind == messages.ASK_OTHER_PORT:
            by = self._asked[socket.address, 2 * self.port + 1 - socket.port]
        elif question.kind == messages.ASK_OTHER_ADDRESS and self.second:
            by = self._asked[self.second, socket.port]
        body = f"{origin[0]} {origin[1]}".encode()
        answer, _ = messages.seal(node.key, node.session, messages.REPLY, body, question.counter, messages.ANSWER)
        if question.kind != messages.ASK_LATER:
            by.transport.sendto(answer, origin)
        elif node.num_later < _MOST_LATER:
            node.num_later += 1
            seconds = min(int.from_bytes(question.body[:2], "big"), _LATER_SECONDS)

            def late() -> None:
                node.num_later -= 1
                by.transport.sendto(answer, origin)

            asyncio.get_running_loop().call_later(seconds, late)

    # --- relays

    def _relay(self, one: int, other: int) -> Relay:
        numbers = min(one, other), max(one, other)
        return self.relays.setdefault(numbers, Relay(numbers))

    async def _relay_port(self, node: Node, other: int) -> int:
        """The pair's own UDP port at the address that the node called."""
        relay = self._relay(node.number, other)
        low, high = relay.numbers
        port = self.port + FIRST_PAIR + (high - 1) * (high - 2) // 2 + low - 1

        def take(socket: Socket, data: bytes, origin: tuple[str, int]) -> None:
            if (number := relay.senders.get(origin)) is not None and data[:4] != messages.MAGIC:
                relay.take(number, data)
            elif asked := self._open_question(data):
                sender, question = asked
                if question.kind == messages.BIND and sender.number in relay.numbers:
                    relay.bind(sender.number, socket, origin)
                    answer = sender.key, sender.session, messages.REPLY, b"", question.counter, messages.ANSWER
                    socket.transport.sendto(messages.seal(*answer)[0], origin)

        if node.at not in relay.sockets:
            relay.sockets[node.at] = await Socket.open(take, node.at, port)
        return port

    async def _carry(self, node: Node, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """A node without UDP: frames of its connection, each with the number of the other node before a datagram."""
        writer.write(as_frame({"do": "carry"}))
        numbers = range(1, len(sites_of(self.keys)) + 1)
        legs: dict[int, Callable[[bytes], None]] = {}
        try:
            while body := await read_frame(reader):
                number, data = int.from_bytes(body[:2], "big"), body[2:]
                if number not in numbers or number == node.number:
                    return
                relay = self._relay(node.number, number)
                if number not in legs:
                    legs[number] = relay.legs[node.number] = lambda data, n=number: _write(  # type: ignore[misc]
                        writer, frame(n.to_bytes(2, "big") + data)
                    )
                if data:  # else it only says where it is
                    relay.take(node.number, data)
        finally:
            for number, leg in legs.items():
                relay = self._relay(node.number, number)
                if relay.legs.get(node.number) is leg:
                    del relay.legs[node.number]


def _write(writer: asyncio.StreamWriter, data: bytes) -> None:
    if not writer.is_closing() and writer.transport.get_write_buffer_size() < _MOST_BUFFERED:
        writer.write(data)
