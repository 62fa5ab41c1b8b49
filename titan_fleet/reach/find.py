"""What a node asks the serving machine over UDP: how it looks from there, and what its router lets in."""

import contextlib
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from titan_fleet.reach import messages
from titan_fleet.reach.routers import Endpoint, Seen
from torchtitan.launch.addresses import address_toward

_WAIT_SECONDS, _TRIES = 0.4, 3
_IP_RECVERR, _PROBE, _ERRORS = 11, 3, 0x2000  # Linux
_WHOLE = {socket.AF_INET: (socket.IPPROTO_IP, 10), socket.AF_INET6: (socket.IPPROTO_IPV6, 23)}  # no fragments
_SIZES = (1500, 1492, 1480, 1460, 1440, 1400, 1340, 1280)  # bytes of a packet: common links, and the least of IPv6
_HEADERS = {socket.AF_INET: 28, socket.AF_INET6: 48}  # with those of UDP
_HOPS = 4
HELD_SECONDS = (5, 10, 20, 30, 45, 60, 90, 120, 180, 240, 300)


@dataclass(frozen=True)
class Asker:
    """Asks the serving machine from a socket, under the session that TLS gave."""

    session: bytes
    key: bytes

    def question(self, kind: int, body: bytes = b"", size: int = messages.QUESTION) -> tuple[bytes, int]:
        return messages.seal(self.key, self.session, kind, body, size=size)

    def reply(self, data: bytes) -> messages.Datagram | None:
        found = messages.unseal(data, lambda session: self.key if session == self.session else None)
        return found if found and found.kind == messages.REPLY else None

    def replies(self, by: socket.socket, seconds: float) -> Iterator[messages.Datagram]:
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            by.settimeout(left)
            with contextlib.suppress(OSError):
                if found := self.reply(by.recv(2048)):
                    yield found

    def ask(self, by: socket.socket, kind: int, to: Endpoint) -> Endpoint | None:
        """Where the socket seems to be; None: no answer."""
        counters = set()
        for _ in range(_TRIES):
            data, counter = self.question(kind)
            counters.add(counter)
            with contextlib.suppress(OSError):
                by.sendto(data, to)
            for reply in self.replies(by, _WAIT_SECONDS):
                if reply.counter in counters:
                    return to_endpoint(reply)
        return None


def to_endpoint(reply: messages.Datagram) -> Endpoint:
    address, port = reply.body.decode().split()
    return address, int(port)


def look(asker: Asker, server: Endpoint, second: str | None) -> Seen:
    """How the router treats sockets of this machine."""
    own, port = address_toward(server[0]) or "0.0.0.0", server[1]
    with _udp(server) as by, _udp(server) as other:
        if (first := asker.ask(by, messages.ASK, server)) is None:
            return Seen((own, by.getsockname()[1]), hops=_hops(server))
        mapped = [first, asker.ask(by, messages.ASK, (server[0], port + 1))]
        by_second = asker.ask(by, messages.ASK, (second, port)) if second else None
        mapped.append(by_second)
        asker.ask(other, messages.ASK, server)
        from_port = asker.ask(other, messages.ASK_OTHER_PORT, server) is not None
        # The other address counts only where it can be reached at all.
        from_address = asker.ask(other, messages.ASK_OTHER_ADDRESS, server) is not None if by_second else None
        return Seen(
            (own, by.getsockname()[1]), [each for each in mapped if each], from_port, from_address, _hops(server)
        )


def largest_packet(asker: Asker, server: Endpoint) -> int:
    """Bytes of the largest IP packet that reaches the serving machine whole."""
    with _udp(server) as by:
        by.setsockopt(*_WHOLE[by.family], _PROBE)
        sizes = {}
        for size in _SIZES * 2:
            data, counter = asker.question(messages.ASK, size=size - _HEADERS[by.family])
            sizes[counter] = size
            with contextlib.suppress(OSError):  # larger than this machine's own link takes
                by.sendto(data, server)
        passed = [sizes.get(reply.counter, 0) for reply in asker.replies(by, _WAIT_SECONDS)]
        return max([*passed, _SIZES[-1]])


def held(
    asker: Asker, server: Endpoint, ended: Callable[[], bool], seconds: Sequence[int] = HELD_SECONDS
) -> tuple[int, int | None]:
    """How long the router lets an answer in after the last packet: at least, and less than (None: longest tried)."""
    with contextlib.ExitStack() as sockets:
        asked = []
        for each in seconds:
            by = sockets.enter_context(_udp(server))
            with contextlib.suppress(OSError):
                by.sendto(asker.question(messages.ASK_LATER, each.to_bytes(2, "big"))[0], server)
            asked.append(by)
        least, begin = 0, time.monotonic()
        for each, by in zip(seconds, asked, strict=True):
            while not ended():
                if any(asker.replies(by, 0.5)):
                    least = each
                    break
                if time.monotonic() - begin > each + 2:
                    return least, each
        return least, None


def _hops(server: Endpoint) -> list[str]:
    """The first routers on the way, which say so when a packet may go no further."""
    found = []
    for hops in range(1, _HOPS + 1) if ":" not in server[0] else ():
        with _udp(server) as by:
            by.setsockopt(socket.IPPROTO_IP, _IP_RECVERR, 1)
            by.setsockopt(socket.IPPROTO_IP, socket.IP_TTL, hops)
            with contextlib.suppress(OSError):
                by.sendto(b"hop", server)
            time.sleep(0.1)
            with contextlib.suppress(OSError):
                by.setblocking(False)
                _, about, _, _ = by.recvmsg(64, 512, _ERRORS)
                for level, kind, data in about:
                    if (level, kind) == (socket.IPPROTO_IP, _IP_RECVERR):  # an error of 16 bytes, then who said it
                        found.append(socket.inet_ntoa(struct.unpack_from("4x4s", data, 16)[0]))
    return found


def _udp(server: Endpoint) -> socket.socket:
    made = socket.socket(socket.AF_INET6 if ":" in server[0] else socket.AF_INET, socket.SOCK_DGRAM)
    made.bind(("", 0))
    return made
