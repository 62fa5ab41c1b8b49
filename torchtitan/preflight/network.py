"""How this node meets others: its addresses, the one that leads to another machine, the one gloo would take.

Nothing but the standard library, for Linux; elsewhere interfaces have no names here.
"""

import contextlib
import ipaddress
import json
import socket
import statistics
import struct
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchtitan.refusal import Refusal

LONGEST_MESSAGE_BYTES = 2**22
_SIOCGIFADDR = 0x8915
_TRIES_SECONDS = 5  # of one attempt to connect
_BULK_SECONDS = 0.1
_PINGS = 20


def own_addresses() -> dict[str, str]:
    """The interface of each address of this machine."""
    found = {}
    if sys.platform == "linux":
        import fcntl

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
            for _, name in socket.if_nameindex():
                with contextlib.suppress(OSError):  # it has none of IPv4
                    answer = fcntl.ioctl(s.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()))
                    found[socket.inet_ntoa(answer[20:24])] = name
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, *_, name = line.split()
            found[str(ipaddress.IPv6Address(bytes.fromhex(digits)))] = name
    return found


def in_words(addresses: Mapping[str, str]) -> str:
    """`eth0 (10.0.0.1), eth1 (10.1.0.1)`, without those that lead to no other machine."""
    known = [f"{name} ({address})" for address, name in addresses.items() if not is_local(address)]
    return ", ".join(known) or "no address but its own loopback"


def is_local(address: str) -> bool:
    """Whether an address means nothing to other networks: loopback, or link-local."""
    plain = ipaddress.ip_address(address.partition("%")[0])
    return plain.is_loopback or plain.is_link_local


def interface_of(address: str | None, addresses: Mapping[str, str]) -> str:
    """Its name; ? where the address is none of this machine's first ones."""
    if address is not None and ipaddress.ip_address(address.partition("%")[0]).is_loopback:
        return "lo"
    return addresses.get(address or "", "?")


def leads_here(host: str, addresses: Mapping[str, str]) -> bool:
    """Whether a name or address means this machine."""
    with contextlib.suppress(OSError):
        found = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0][4][0]
        return interface_of(str(found), addresses) != "?"
    return False


def split_endpoint(endpoint: str) -> tuple[str, int]:
    host, _, port = endpoint.rpartition(":")
    return host.strip("[]"), int(port)


def address_toward(host: str) -> str | None:
    """This machine's address on the way to another; None where there is no way, or no such name."""
    with contextlib.suppress(OSError):
        family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as s:
            s.connect(address)  # of a datagram socket: looks up the route, sends nothing
            return str(s.getsockname()[0])
    return None


def gloo_address(env: Mapping[str, str], addresses: Mapping[str, str]) -> str:
    """Where gloo will listen, by its own rule: the named interface, else what this host's name means, else loopback."""
    if named := env.get("GLOO_SOCKET_IFNAME"):
        name = named.split(",")[0].strip()
        found = next((address for address, of in addresses.items() if of == name), None)
        if found is None:
            raise Refusal(
                f"GLOO_SOCKET_IFNAME = {named}, but this node has no such interface with an address; "
                f"use one of {in_words(addresses)}"
            )
        return found
    with contextlib.suppress(OSError):
        for family, kind, protocol, _, address in socket.getaddrinfo(socket.gethostname(), 0, type=socket.SOCK_STREAM):
            with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as s:
                s.bind(address)
                return str(address[0])
    return "127.0.0.1"


def nccl_interfaces(env: Mapping[str, str], addresses: Mapping[str, str]) -> None:
    """Refuses an NCCL_SOCKET_IFNAME that fits no interface: a list of prefixes, =exact names, or ^names to exclude."""
    named = env.get("NCCL_SOCKET_IFNAME", "")
    words = [word.strip() for word in named.lstrip("^=").split(",")]
    exact = named.lstrip("^").startswith("=")
    fits = {n for n in addresses.values() for word in words if n == word or (not exact and n.startswith(word))}
    if named and not (set(addresses.values()) - fits if named.startswith("^") else fits):
        raise Refusal(
            f"NCCL_SOCKET_IFNAME = {named} leaves no interface of this node; use one of {in_words(addresses)}"
        )


def way_to_head(head: str) -> tuple[str, str] | None:
    """This node's address and interface toward the head, where its own name means loopback, as Debian sets it up.

    Others would be told that name's address, 127.0.1.1: gloo waits for them there, past its own timeout.
    """
    addresses = own_addresses()
    if not is_local(gloo_address({}, addresses)):
        return None
    toward = address_toward(split_endpoint(head)[0])
    return None if toward is None or toward not in addresses or is_local(toward) else (toward, addresses[toward])


class Channel:
    """Messages over a connection, each one line of JSON, of bounded length."""

    def __init__(self, connection: socket.socket, seconds: float) -> None:
        self.connection = connection
        connection.settimeout(seconds)
        self._lines = connection.makefile("rb")

    def send(self, **message: Any) -> None:
        self.connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> dict[str, Any]:
        line = self._lines.readline(LONGEST_MESSAGE_BYTES)
        if not line.endswith(b"\n"):
            raise ConnectionError("it hung up")
        try:
            message = json.loads(line)
        except ValueError:
            raise ConnectionError("it sent something that is not a message") from None
        if not isinstance(message, dict):
            raise ConnectionError("it sent something that is not a message")
        return message

    def close(self) -> None:
        self._lines.close()
        self.connection.close()


def connect(endpoint: str, deadline: float) -> socket.socket:
    """A connection; tried again until the deadline, for the other may begin later. OSError says why it failed."""
    reason: OSError = TimeoutError()  # the last that says more than that time was over
    while True:
        left = deadline - time.monotonic()
        try:
            return socket.create_connection(split_endpoint(endpoint), timeout=max(0.1, min(_TRIES_SECONDS, left)))
        except OSError as error:
            reason = reason if isinstance(error, TimeoutError) else error
            if time.monotonic() + 0.3 > deadline:
                raise reason from None
            time.sleep(0.3)


def listen(port: int, address: str = "") -> socket.socket:
    """A listening socket; if no address is given, on all of them, IPv4 and IPv6."""
    if address == "" and socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, port), family=family)


def what_failed(error: OSError) -> str:
    """The way a connection failed, and what that means."""
    if isinstance(error, socket.gaierror):
        return "that name has no address here; use one that the nodes' DNS or /etc/hosts knows, or a numeric address"
    if isinstance(error, ConnectionRefusedError):
        return "connection refused: a machine is there, but nothing listens at this port, or a firewall rejects it"
    if isinstance(error, TimeoutError):
        return "no answer: a firewall drops it, or no machine has this address"
    return (
        f"{(error.strerror or str(error)).lower()}: no such machine in this node's networks, or a firewall rejects it"
    )


def measure_with(connection: socket.socket, leads: bool) -> tuple[float, float, float]:
    """Seconds of a round trip, bytes a second there and back over one TCP stream; one end leads, the other follows."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    trips = []
    for _ in range(_PINGS):
        begin = time.perf_counter()
        if leads:
            connection.sendall(b"ping")
        receive_exactly(connection, 4)
        if not leads:
            connection.sendall(b"ping")
        trips.append(time.perf_counter() - begin)
    if leads:
        _pour(connection)
        received = struct.unpack("d", receive_exactly(connection, 8))[0]
        return statistics.median(trips), received, _drink(connection)
    received = _drink(connection)
    connection.sendall(struct.pack("d", received))
    _pour(connection)
    return statistics.median(trips), received, 0.0


def receive_exactly(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:  # MSG_WAITALL does not wait where there is a timeout
        part = connection.recv(count - len(data))
        if not part:
            raise ConnectionError("the other end hung up")
        data += part
    return data


def _pour(connection: socket.socket) -> None:
    block, end = bytes(2**18), time.perf_counter() + _BULK_SECONDS
    while time.perf_counter() < end:
        connection.sendall(block)
    connection.shutdown(socket.SHUT_WR)


def _drink(connection: socket.socket) -> float:
    """Bytes a second, by who receives: what the sender has handed over may still wait in its buffers."""
    buffer = bytearray(2**18)
    begin, total = time.perf_counter(), 0
    while count := connection.recv_into(buffer):
        total += count
    return total / (time.perf_counter() - begin)
