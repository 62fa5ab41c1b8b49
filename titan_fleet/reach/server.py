"""The serving machine: nodes meet here over mutual TLS, learn how they look from outside, and are relayed if need be.

It knows names, WireGuard's public keys and addresses. What it relays is WireGuard's, which it cannot read. It keeps
nothing on its disk, answers no stranger, and needs no root.
"""

import asyncio
import contextlib
import hmac
import ipaddress
import itertools
import secrets
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from titan_fleet.reach import messages
from titan_fleet.reach.messages import as_frame, read_message, within
from titan_fleet.reach.relays import Relays, Socket, write
from titan_fleet.reach.routers import to_endpoint, told
from titan_fleet.swarm.certificates import context, named, revoked, sites_of
from torchtitan.launch.addresses import is_local, own_addresses
from torchtitan.refusal import Refusal

_HELLO_SECONDS, SILENT_SECONDS, _REVOKED_SECONDS = 10.0, 10.0, 2.0
_LATER_SECONDS, _MOST_LATER, _MOST_CANDIDATES = 600, 16, 12
_MOST_CONNECTIONS, _MOST_REVOKED = 4, 1000  # of a node; in a message
_PROOF = {"public": 64, "signature": 512, "certificate": 8192}  # characters at most
FIRST_PAIR = 2  # ports of pairs begin so far above --port


@dataclass
class Node:
    """A node that is here."""

    name: str
    number: int
    writer: asyncio.StreamWriter
    carrier: asyncio.StreamWriter | None = None  # of its WireGuard's packets, if it has no UDP
    session: bytes = field(default_factory=lambda: secrets.token_bytes(messages.SESSION_BYTES))
    key: bytes = field(default_factory=lambda: secrets.token_bytes(32))
    fresh: messages.Fresh = field(default_factory=messages.Fresh)
    ways: dict[str, str] = field(default_factory=dict)  # to other nodes, as it says
    num_later: int = 0
    serial: str = ""  # of its certificate
    said: dict[str, Any] = field(default_factory=dict)
    told_through: dict[str, bool] = field(default_factory=dict)

    def tell(self, **message: Any) -> None:
        write(self.writer, as_frame(message))


class Server:
    def __init__(self, keys: Path, network: str, port: int, second: str | None = None, through: str = "") -> None:
        self.keys, self.port, self.second, self.through = keys, port, second, through
        self.network = ipaddress.IPv4Network(network)
        self.nodes: dict[str, Node] = {}
        self.sessions: dict[bytes, Node] = {}
        self.relays = Relays(port + FIRST_PAIR, self._take_bind)
        self._asked: dict[tuple[str, int], Socket] = {}
        self._secret = secrets.token_bytes(32)
        self._connections: Counter[str] = Counter()
        self._revoked: dict[str, str] = {}  # serial number -> name

    @contextlib.asynccontextmanager
    async def serving(self, host: str | None = None) -> AsyncIterator[None]:
        made, server = context(self.keys, is_server=True), None
        watching = asyncio.create_task(self._watch_revoked())
        try:
            for address in [*own_addresses(), *([self.second] if self.second else [])]:
                if not is_local(address):
                    await self._open(address)
            server = await asyncio.start_server(self._connected, host, self.port, ssl=made, ssl_handshake_timeout=10)
            yield
        finally:
            watching.cancel()
            if server:
                server.close()
            for node in self.nodes.values():
                for writer in filter(None, (node.writer, node.carrier)):
                    writer.transport.abort()
            self.relays.close()
            for each in self._asked.values():
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
        peer: Any = writer.get_extra_info("peercert")
        name, serial = named(peer)
        self._connections[name] += 1
        try:
            if self._connections[name] > _MOST_CONNECTIONS:
                return
            self._revoked = revoked(self.keys, self._revoked)
            if serial in self._revoked:
                raise Refusal(f"the certificate of {name} is revoked")
            hello = await within(_HELLO_SECONDS, read_message(reader))
            if hello.get("do") == "carry":
                node_here = self.nodes[name]
                if node_here.carrier:
                    node_here.carrier.transport.abort()
                node_here.carrier = writer
                writer.write(as_frame({"do": "carry"}))
                num_sites = len(sites_of(self.keys))
                await self.relays.carry(node_here.number, reader, writer, range(1, num_sites + 1).__contains__)
            elif hello.get("do") == "join":
                node = await self._welcome(name, hello, writer)
                node.serial = serial
                while message := await within(SILENT_SECONDS, read_message(reader)):
                    if self.nodes.get(name) is not node:  # it was put out, or came again
                        return
                    await self._obey(node, message)
        except Refusal as refusal:
            write(writer, as_frame({"do": "refuse", "why": str(refusal)}))
            print(f"refused: {refusal}", flush=True)
        except (OSError, EOFError, asyncio.TimeoutError, KeyError, TypeError, ValueError, OverflowError):
            pass  # it hung up, or is no node of ours: whoever it is learns nothing
        except asyncio.CancelledError:
            pass  # the serving machine ends: Python 3.11 would print the task's stack
        finally:
            self._connections[name] -= 1
            if node is not None:
                self._forget(node)
            with contextlib.suppress(OSError):
                writer.close()

    async def _watch_revoked(self) -> None:
        """A node that is revoked is put out, and the others drop its key, also if it has hung up before."""
        known: set[str] = set()
        while True:
            self._revoked = revoked(self.keys, self._revoked)
            for node in [node for node in self.nodes.values() if node.serial in self._revoked]:
                why = f"the certificate of {node.name} is revoked"
                print(f"refused: {why}", flush=True)
                node.tell(do="refuse", why=why)
                self._forget(node)
                self.relays.drop(node.number)
            if known != {*self._revoked}:
                known = {*self._revoked}
                for node in self.nodes.values():
                    self._tell_revoked(node)
            await asyncio.sleep(_REVOKED_SECONDS)

    def _tell_revoked(self, node: Node) -> None:
        """It may have their keys."""
        node.tell(do="revoked", serials=[*self._revoked][-_MOST_REVOKED:])

    async def _welcome(self, name: str, hello: dict[str, Any], writer: asyncio.StreamWriter) -> Node:
        sites = sites_of(self.keys)
        if name not in sites:
            raise Refusal(f"{name} is not in sites.json of the serving machine; copy keys/syncer there again")
        number = sites.index(name) + 1
        if number >= self.network.num_addresses - 1:
            raise Refusal(f"--network {self.network} has no address for node {number}; give a larger one")
        await self._open(writer.get_extra_info("sockname")[0])
        for other in self.nodes.values():
            other.told_through.pop(name, None)
        if old := self.nodes.get(name):
            self._forget(old)
            old.writer.transport.abort()
        proof = {key: str(hello[key]) for key in _PROOF}
        if any(len(proof[key]) > most for key, most in _PROOF.items()):
            raise ValueError("no proof is so long")
        node = Node(name, number, writer, said={"proof": proof})
        self.nodes[name], self.sessions[node.session] = node, node
        about = {"session": node.session.hex(), "key": node.key.hex(), "second": self.second, "through": self.through}
        node.tell(do="welcome", name=name, number=number, network=str(self.network), **about)
        print(f"{name} is here, from {writer.get_extra_info('peername')[0]}", flush=True)
        return node

    def _forget(self, node: Node) -> None:
        """It is away: nothing of it stays open."""
        for each in (node.writer, node.carrier):
            if each is not None:
                each.close()
        self.sessions.pop(node.session, None)
        if self.nodes.get(node.name) is node:
            del self.nodes[node.name]
            print(f"{node.name} is away", flush=True)

    async def _obey(self, node: Node, message: dict[str, Any]) -> None:
        match message["do"]:
            case "beat":
                node.tell(do="beat")
            case "here":
                candidates = [to_endpoint(*given) for given in message["candidates"][:_MOST_CANDIDATES]]
                node.said |= {"candidates": candidates, "router": vars(told(message["router"]))}
                self._tell_revoked(node)
                for other in list(self.nodes.values()):
                    if other is not node and "router" in other.said:
                        self._introduce(node, other)
            case "relay" if message["peer"] in sites_of(self.keys):
                relay = self.relays.of(node.number, self._number(message["peer"]))
                if port := await self.relays.open(relay, [address for address, _ in self._asked]):
                    node.tell(do="relay", peer=message["peer"], port=port)
            case "way" if message["peer"] in sites_of(self.keys):
                number, way = self._number(message["peer"]), str(message["way"])[:16]
                node.ways[message["peer"]] = way
                peer = self.nodes.get(message["peer"])
                if way == "direct" and peer and peer.ways.get(node.name) == "direct":
                    # WireGuard answers to where a packet came from: one that is still relayed would lead it back.
                    for each in (node.number, number):
                        self.relays.of(node.number, number).drop(each)
                self._send_through()
            case "leave":
                self._say_left(node.name)

    def _number(self, name: str) -> int:
        """A ValueError, if there is no such node."""
        return sites_of(self.keys).index(name) + 1

    def _say_left(self, name: str) -> None:
        for other in self.nodes.values():
            if other.name != name:
                other.tell(do="left", peer=name)

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

    def _take_bind(self, data: bytes) -> tuple[int, bytes] | None:
        if (asked := self._open_question(data)) is None or asked[1].kind != messages.BIND:
            return None
        node, question = asked
        answer = node.key, node.session, messages.REPLY, b"", question.counter, messages.ANSWER
        return node.number, messages.seal(*answer)[0]

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
