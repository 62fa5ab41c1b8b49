"""Connections between two nodes: exchanges messages, explains failures and measures speed."""

import hmac
import json
import secrets
import socket
import statistics
import struct
import time
from typing import Any

from torchtitan.launch.addresses import split_endpoint

LONGEST_MESSAGE_BYTES = 2**22
_ATTEMPT_SECONDS = 5  # limit of one attempt to connect
_BULK_SECONDS = 0.1
_PINGS = 20


class NotANode(ConnectionError):
    """The other end does not know the secret of this run's nodes."""


class Channel:
    """Sends and receives messages over a connection. A message is one line of JSON of limited length.

    `seconds` is the limit for a whole message, in however small pieces it comes.
    """

    def __init__(self, connection: socket.socket, seconds: float) -> None:
        self.connection, self.seconds = connection, seconds
        self._received = b""

    def send(self, **message: Any) -> None:
        self.connection.settimeout(self.seconds)
        self.connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> dict[str, Any]:
        end = time.monotonic() + self.seconds
        while b"\n" not in self._received:
            self.connection.settimeout(max(0.001, end - time.monotonic()))
            if not (part := self.connection.recv(2**16)):
                raise ConnectionError("it hung up")
            self._received += part
            if len(self._received) > LONGEST_MESSAGE_BYTES:
                raise ConnectionError("it sent something that is not a message")
        line, _, self._received = self._received.partition(b"\n")
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            raise ConnectionError("it sent something that is not a message") from None
        if not isinstance(message, dict):
            raise ConnectionError("it sent something that is not a message")
        return dict(_printable(message))

    def prove(self, secret: str, leads: bool) -> None:
        """Both ends show that they know the nodes' secret. It is not sent, and no answer serves a second time."""
        self.send(challenge=(mine := secrets.token_hex(16)))
        theirs = str(self.receive().get("challenge"))
        self.send(proof=_proof(secret, leads, theirs, mine))
        proof = str(self.receive().get("proof"))
        if not hmac.compare_digest(proof.encode(), _proof(secret, not leads, mine, theirs).encode()):
            raise NotANode("it does not know the secret of this run's nodes")

    def close(self) -> None:
        self.connection.close()


def _proof(secret: str, leads: bool, *challenges: str) -> str:
    return hmac.new(secret.encode(), json.dumps([leads, *challenges]).encode(), "sha256").hexdigest()


def _printable(value: Any) -> Any:
    """What came from another machine, without the characters that could command a terminal."""
    if isinstance(value, str):
        return "".join(c if c.isprintable() else "?" for c in value)
    if isinstance(value, dict):
        return {_printable(key): _printable(of) for key, of in value.items()}
    return [_printable(of) for of in value] if isinstance(value, list) else value


def connect(endpoint: str, deadline: float) -> socket.socket:
    """Connect, and try again until the deadline, for the other end may start later. The OSError tells why it failed."""
    reason: OSError = TimeoutError()  # the last error that says more than a timeout
    while True:
        left = deadline - time.monotonic()
        try:
            return socket.create_connection(split_endpoint(endpoint), timeout=max(0.1, min(_ATTEMPT_SECONDS, left)))
        except OSError as error:
            reason = reason if isinstance(error, TimeoutError) else error
            if time.monotonic() + 0.3 > deadline:
                raise reason from None
            time.sleep(0.3)


def listen(port: int, address: str = "") -> socket.socket:
    """A listening socket; without an address it listens on all of them, IPv4 and IPv6."""
    if address == "" and socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, port), family=family)


def what_failed(error: OSError) -> str:
    """How a connection failed, and what the usual causes are."""
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
    """Seconds of a round trip, and bytes a second there and back over one TCP stream. One of the two ends leads."""
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
    while len(data) < count:  # MSG_WAITALL does not wait on a socket with a timeout
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
    """Bytes a second, measured by the receiver: the sender's last bytes may still wait in its buffers."""
    buffer = bytearray(2**18)
    begin, total = time.perf_counter(), 0
    while count := connection.recv_into(buffer):
        total += count
    return total / (time.perf_counter() - begin)
