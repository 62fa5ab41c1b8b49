"""A node of the network: it meets the others at the serving machine, opens ways to them, and keeps the network up."""

import asyncio
import contextlib
import ipaddress
import socket
import time
from pathlib import Path
from typing import Any

from titan_fleet.reach import find, messages, routers, wireguard
from titan_fleet.reach.carry import Carrier, Streams
from titan_fleet.reach.inside import Inside
from titan_fleet.reach.leave import state_file, write_state
from titan_fleet.reach.messages import as_frame, read_message, within
from titan_fleet.reach.peer import Peer
from titan_fleet.reach.port import Port, is_beside
from titan_fleet.reach.proof import check, sign
from titan_fleet.reach.routers import Endpoint, Router, can_open, choose_way, judge, to_endpoint
from titan_fleet.reach.server import SILENT_SECONDS
from titan_fleet.swarm.certificates import context
from torchtitan.launch.addresses import address_toward, is_local, own_addresses
from torchtitan.refusal import Refusal

_BEAT_SECONDS, _PAUSES = 2.0, (0.5, 1.0, 2.0, 4.0)
_NO_UDP_SECONDS = 7.0
_ROAM_SECONDS = 1.0


class Node:
    def __init__(self, keys: Path, host: str, port: int, interface: str, listen: int, out: Path) -> None:
        self.keys, self.host, self.port = keys, host, port
        self.interface = wireguard.Interface(interface)
        self.private, self.public = wireguard.new_keys()
        self.listen, self.keepalive, self.out = listen, routers.keepalive(0, None), out
        self.peers: dict[str, Peer] = {}
        self.name, self.address, self.number = "", "", 0
        self.router: Router | None = None
        self.mapped: dict[str, Endpoint] = {}  # by address of the serving machine: how WireGuard's port looks there
        self.through = ""  # a node that passes on what has no direct way
        self.udp_at = 0.0  # the last answer over UDP
        self.servers: list[str] = []
        self.relay_ports: dict[str, int] = {}
        self.stop = asyncio.Event()
        self._asker = find.Asker(b"", b"")
        self._network = ipaddress.IPv4Network("10.88.0.0/24")
        self._said: Any = None
        self._is_hub = False
        self._own = ""
        self._udp: Port | None = None
        self._inside: Inside | None = None
        self._background: set[asyncio.Task[None]] = set()
        self._writer: asyncio.StreamWriter | None = None
        self._carrier = Carrier(self._connect, listen)

    # --- the connection to the serving machine

    async def run(self) -> None:
        """Until `stop` is set; then everything that was made is gone."""
        ticking = asyncio.create_task(self._tick())
        stopped = asyncio.create_task(self.stop.wait())
        meeting = asyncio.create_task(self._meet_again())
        try:
            done, _ = await asyncio.wait((ticking, stopped, meeting), return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            tasks = ticking, stopped, meeting, *self._background
            self.stop.set()
            self._tell(do="leave")
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if self._writer:
                with contextlib.suppress(OSError, asyncio.TimeoutError):
                    await asyncio.wait_for(self._writer.drain(), 1)
                self._writer.close()
            if self.interface.is_up:
                self.interface.remove()
                state_file(self.interface.name).unlink(missing_ok=True)
            for each in (self._carrier, self._udp, self._inside):
                if each:
                    each.close()

    async def _connect(self) -> Streams:
        tls = context(self.keys, is_server=False)
        return await within(10, asyncio.open_connection(self.host, self.port, ssl=tls))

    async def _meet_again(self) -> None:
        tries = 0
        while True:
            try:
                await self._meet()
            except (OSError, EOFError, asyncio.TimeoutError) as error:
                if not self.name:
                    raise Refusal(
                        f"{self.host} port {self.port} serves no node ({str(error) or 'no answer'}); is "
                        "`reach serve` running there, are these keys of its authority, does its firewall let TCP in?"
                    ) from None
                tries = 0 if self._writer else tries
                if tries == 0:
                    print(f"{self.host} does not answer ({str(error) or 'silence'}); direct ways stay up", flush=True)
            self._writer = None
            await asyncio.sleep(_PAUSES[min(tries, len(_PAUSES) - 1)])
            tries += 1

    async def _meet(self) -> None:
        reader, writer = await self._connect()
        beats: asyncio.Task[None] | None = None
        try:
            writer.write(as_frame({"do": "join"} | sign(self.keys, self.public)))
            welcome = await within(10, read_message(reader))
            if welcome["do"] == "refuse":
                raise Refusal(f"{self.host} refuses this node: {welcome['why']}")
            self._writer = writer
            try:
                await self._take_welcome(welcome)
            except (KeyError, TypeError, ValueError) as error:
                why = f"{self.host} sends a welcome that this version does not know ({error}); use the same one there"
                raise error if isinstance(error, Refusal) else Refusal(why) from None
            beats = asyncio.create_task(self._beat())
            while True:
                message = await within(SILENT_SECONDS, read_message(reader))
                if message.get("do") == "refuse":
                    raise Refusal(f"{self.host} refuses this node: {message.get('why')}")
                try:
                    self._obey(message)
                except (LookupError, TypeError, ValueError) as error:
                    print(f"{self.name}: a message that is none is left out ({type(error).__name__})", flush=True)
        finally:
            if beats:
                beats.cancel()
            writer.close()

    async def _take_welcome(self, welcome: dict[str, Any]) -> None:
        is_new = self._inside is None
        self.name, self.number = str(welcome["name"]), int(welcome["number"])
        given = str(welcome["network"])
        self._network, address = wireguard.address_in(given, self.number, self.host, self.interface.name)
        if self.address not in ("", address):
            raise Refusal(f"{self.host} now gives this node {address}, not {self.address}; start `reach join` again")
        self.address = address
        self._carrier.meet_again()
        self._said, self.mapped = None, {}
        self.relay_ports.clear()
        self.through = str(welcome["through"])
        self._asker = find.Asker(bytes.fromhex(welcome["session"]), bytes.fromhex(welcome["key"]))
        found = await asyncio.get_running_loop().getaddrinfo(self.host, self.port, type=socket.SOCK_DGRAM)
        self.servers = sorted({str(row[4][0]) for row in found}, key=lambda address: ":" in address)
        own = address_toward(self.servers[0]) or ""
        if is_new or own != self._own:
            self._own = own
            await self._look(welcome, is_new)
        if self._is_hub != (self.through == self.name):
            self._is_hub = not self._is_hub
            self.interface.pass_on(self._is_hub)
        for peer in self.peers.values():
            peer.may_go_through = False
            self._tell(do="way", peer=peer.name, way=peer.way)

    async def _look(self, welcome: dict[str, Any], is_new: bool) -> None:
        server = self.servers[0], self.port
        seen = await asyncio.to_thread(find.look, self._asker, server, welcome["second"])
        self.router = judge(seen)
        self.udp_at = time.monotonic() if seen.mapped else 0.0
        print(f"{self.name}: {self.router.in_words} ({self.router.reason})", flush=True)
        if is_new:
            largest = await asyncio.to_thread(find.largest_packet, self._asker, server) if seen.mapped else 1500
            mtu = largest - wireguard.OVERHEAD
            self.interface.bring_up(self.private, self.listen, self.address, self._network.prefixlen, mtu)
            self._udp = Port(self.listen, self._take, self.servers[0])
            inside = Inside(self.name, self.address, self.peers, self.out)
            await inside.start()
            self._inside = inside
            self._note()
            print(f"{self.name}: {self.interface.name} has {self.address}, packets of {mtu} bytes", flush=True)
            if seen.mapped:
                self._background.add(asyncio.create_task(self._learn_patience(server)))

    async def _learn_patience(self, server: Endpoint) -> None:
        least, below = await asyncio.to_thread(find.held, self._asker, server, self.stop.is_set)
        to = f"less than {below} s" if below else "more, as far as was tried"
        self.keepalive = routers.keepalive(least, below)
        print(f"{self.name}: a way without traffic stays open for {least} s at least, and {to}", flush=True)
        for peer in self.peers.values():
            self._set(peer)

    def _note(self) -> None:
        pairs = {
            peer.name: {"way": peer.way, "for": peer.reason, "address": peer.address} for peer in self.peers.values()
        }
        router = vars(self.router) if self.router else {}
        write_state(self.interface.name, {"name": self.name, "address": self.address, "router": router, "pairs": pairs})

    def _tell(self, **message: Any) -> None:
        if self._writer and not self._writer.is_closing():
            self._writer.write(as_frame(message))

    async def _beat(self) -> None:
        """Keeps the connection, learns how WireGuard's port looks from outside, and says so when that changes."""
        while True:
            self._tell(do="beat")
            for server in self.servers:
                self._ask(messages.ASK, (server, self.port))
            await asyncio.sleep(0.5 if self._said is None else 0.05)
            self._say_where()
            await asyncio.sleep(_BEAT_SECONDS if self._said else 0.1)

    def _ask(self, kind: int, to: Endpoint) -> None:
        if self._udp:
            self._udp.send(self._asker.question(kind)[0], to)

    @property
    def has_udp(self) -> bool:
        return time.monotonic() < self.udp_at + _NO_UDP_SECONDS

    def _say_where(self) -> None:
        assert self.router and self._udp
        own = [a for a, of in own_addresses().items() if not is_local(a) and not is_beside(of, self._udp.uplink)]
        candidates = [*self.mapped.values(), *((address, self.listen) for address in own)]
        said = {"candidates": list(dict.fromkeys(candidates)), "router": vars(self.router)}
        if said != self._said:
            self._said = said
            self._tell(do="here", **said)

    # --- the others

    def _obey(self, message: dict[str, Any]) -> None:
        match message["do"]:
            case "peer":
                self._take_peer(message)
            case "left":
                self._drop(str(message["peer"]), "left")
            case "revoked":
                for name in [name for name, peer in self.peers.items() if peer.serial in message["serials"]]:
                    self._drop(name, "was revoked")
            case "through":
                if peer := self.peers.get(message["peer"]):
                    peer.may_go_through = bool(message["on"])
            case "relay":
                self.relay_ports[message["peer"]] = to_endpoint(self.servers[0], message["port"])[1]

    def _take_peer(self, message: dict[str, Any]) -> None:
        name, number = str(message["name"]), int(message["number"])
        others = [peer for peer in self.peers.values() if peer.name != name]
        try:
            public, serial = check(self.keys, name, message["proof"])
            if public in (self.public, *(peer.public for peer in others)):
                raise Refusal(f"{name} shows the key of another node; do not trust it")
            if number in (self.number, *(peer.number for peer in others)):
                raise Refusal(f"{name} has the address of another node; do not trust this serving machine")
        except Refusal as refusal:
            print(f"error: {refusal}", flush=True)
            return
        peer = self.peers.get(name)
        if peer is None or peer.public != public or peer.number != number:
            address, key = str(self._network[number]), bytes.fromhex(message["key"])
            new = Peer(name, number, self.number, address, public, serial, key, [], routers.told(message["router"]))
            if peer:
                self._drop(name, "came back")
            self._set(new)
            self.peers[name] = peer = new
        peer.take_news(message, public)

    def _set(self, peer: Peer) -> None:
        """Give WireGuard a peer's endpoint, and the addresses that are reached there: also those behind this node."""
        if peer.way == "through":
            if (hub := self.peers.get(peer.used)) is None:  # it left: another way is chosen at once
                return
            peer = hub
        beyond = [each.address for each in self.peers.values() if (each.way, each.used) == ("through", peer.name)]
        self.interface.set_peer(peer.public, [peer.address, *beyond], peer.used or None, self.keepalive)

    async def _set_again(self, peer: Peer, endpoint: str) -> None:
        """A packet that was still relayed has led WireGuard back to the relay, which now passes none on."""
        await asyncio.sleep(_ROAM_SECONDS)
        if self.peers.get(peer.name) is peer and (peer.way, peer.used) == ("direct", endpoint):
            self._set(peer)

    def _drop(self, name: str, why: str) -> None:
        if peer := self.peers.pop(name, None):
            if self._inside:
                self._inside.end_connections(peer, why)
            self.interface.remove_peer(peer.public)
            self.relay_ports.pop(name, None)

    def _take(self, data: bytes, origin: Endpoint) -> None:
        """A sealed datagram that came to WireGuard's port."""
        assert self._udp
        if reply := self._asker.reply(data):
            self.udp_at = time.monotonic()
            if reply.body and origin[1] == self.port:
                self.mapped[origin[0]] = find.to_endpoint(reply)
            return
        for peer in self.peers.values():
            if found := peer.unseal(data):
                peer.take(found, origin, self._udp.send)
                return

    async def _tick(self) -> None:
        bound_at = 0.0
        while True:
            await asyncio.sleep(0.1)
            if not self._udp or not self._inside:
                continue
            self._inside.tick()
            is_time, now = time.monotonic() > bound_at + 2, time.monotonic()
            for peer in list(self.peers.values()):
                peer.tick(self._udp.send)
                await self._choose(peer)
                if peer.way == "relayed" and is_time and self.relay_ports.get(peer.name):
                    self._ask(messages.BIND, (self.servers[0], self.relay_ports[peer.name]))
            bound_at = now if is_time else bound_at

    async def _choose(self, peer: Peer) -> None:
        assert self.router
        if peer.is_trying and not peer.way and can_open(self.router, peer.router)[0]:
            return
        hub = self.peers.get(self.through) if peer.may_go_through else None
        through = hub.name if hub and hub.way == "direct" else ""
        way, reason = choose_way(self.router, peer.router, peer.endpoint is not None, self.has_udp, through)
        port, now = self.relay_ports.get(peer.name, 0), time.monotonic()
        if way == "relayed" and not port and now > peer.relay_asked_at + _BEAT_SECONDS:
            peer.relay_asked_at = now
            self._tell(do="relay", peer=peer.name)
        if way == "direct":
            assert peer.endpoint
            endpoint = messages.to_endpoint(*peer.endpoint)
        elif way == "through":
            endpoint = through
        elif way == "relayed":
            if not port:
                return
            endpoint = messages.to_endpoint(self.servers[0], port)
        else:
            endpoint = await self._carrier.endpoint(peer.number)
        if (way, endpoint) != (peer.way, peer.used):
            if way == "relayed":
                self._ask(messages.BIND, (self.servers[0], self.relay_ports[peer.name]))
            if self.peers.get(peer.name) is not peer:  # it left meanwhile
                return
            peer.way, peer.used, peer.reason = way, endpoint, reason
            self._set(peer)
            self._tell(do="way", peer=peer.name, way=way)
            if way == "direct":
                task = asyncio.create_task(self._set_again(peer, endpoint))
                self._background.add(task)
                task.add_done_callback(self._background.discard)
            print(f"{self.name} - {peer.name}: {way} ({endpoint}), for {reason}", flush=True)
            self._note()
