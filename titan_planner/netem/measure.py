"""Measures emulated links: the delay of single packets in one direction, and the rate of a second's part of them."""

import contextlib
import itertools
import socket
import struct
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from titan_planner.netem.namespaces import inside

_UDP_SEGMENT, _UDP_GRO = 103, 104  # cut and join datagrams in the kernel
_SO_TIMESTAMPNS = 35
_PAYLOAD, _ON_THE_LINK = 1472, 1500  # bytes of a datagram, and with its IP and UDP headers
_PROBES, _SECONDS, _LEAST = 12, 0.4, 80  # packets for a delay; of sending for a rate, and its fewest datagrams
_SHARE, _SECONDS_OFF = 0.1, 0.00025  # that a link may be off; no delay is more exact than a quarter millisecond
_TRIES = 5


@dataclass(frozen=True)
class Link:
    """One direction between two sites, in seconds and bits a second: what was asked and what was measured."""

    origin: int
    target: int
    asked: tuple[float, float]
    measured: tuple[float, float] = (float("inf"), 0.0)

    @property
    def off(self) -> float:
        """The larger relative error of delay and rate; above 1: more than 10 %."""
        delay, rate = (abs(measured - asked) for measured, asked in zip(self.measured, self.asked, strict=True))
        return max(delay / max(_SHARE * self.asked[0], _SECONDS_OFF), rate / (_SHARE * self.asked[1]))


def sample(delay: Sequence[Sequence[float]], rate: Sequence[Sequence[float]], count: int) -> list[Link]:
    """At most `count` links (0: all), first one of each kind, spread over the sites."""
    pairs = itertools.permutations(range(len(delay)), 2)
    links = [Link(a, b, (delay[a][b], rate[a][b])) for a, b in pairs]
    if not count:
        return links
    kinds: dict[tuple[float, float], Link] = {}
    for link in links:
        kinds.setdefault(link.asked, link)
    first = list(kinds.values())
    rest = [link for link in links if link not in first]
    chosen = first + rest[:: max(1, len(rest) // max(1, count - len(first)))]
    return chosen[:count] if len(first) <= count else [first[i * len(first) // count] for i in range(count)]


def measure(link: Link, namespaces: Sequence[str], addresses: Sequence[str]) -> Link:
    """The nearest delay and the nearest rate of some tries, since a busy machine delays what it should not."""
    for _ in range(_TRIES):
        with contextlib.ExitStack() as ends:
            with inside(namespaces[link.target]):
                target = ends.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
            with inside(namespaces[link.origin]):
                origin = ends.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
            target.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
            target.bind((addresses[link.target], 0))
            target.settimeout(2 * link.asked[0] + 2)
            origin.connect(target.getsockname())
            found = _delay(origin, target), _rate(origin, target, link.asked[1])
        nearest = [
            min(two, key=lambda one, asked=asked: abs(one - asked))  # type: ignore[misc]
            for asked, *two in zip(link.asked, found, link.measured, strict=True)
        ]
        link = replace(link, measured=(nearest[0], nearest[1]))
        if link.off <= 1:
            break
    return link


def _delay(origin: socket.socket, target: socket.socket) -> float:
    """The shortest of some."""
    for _ in range(_PROBES):
        origin.send(struct.pack("d", time.time()))
        time.sleep(0.002)
    delays = []
    with contextlib.suppress(TimeoutError):
        for _ in range(_PROBES):
            arrived, packet = _receive(target)
            delays.append(arrived - struct.unpack("d", packet)[0])
    return min(delays, default=float("inf"))


def _receive(target: socket.socket) -> tuple[float, bytes]:
    """A datagram, and when the kernel received it; this process may have been waiting for a core."""
    packet, about, _, _ = target.recvmsg(70000, 256)
    seconds, nanoseconds = next(struct.unpack("ll", data) for _, kind, data in about if kind == _SO_TIMESTAMPNS)
    return seconds + nanoseconds * 1e-9, packet


def _rate(origin: socket.socket, target: socket.socket, asked: float) -> float:
    """Of datagrams that are sent as fast as the link takes them; the first fifth may use what it had saved up."""
    count = max(_LEAST, int(asked * _SECONDS / 8 / _ON_THE_LINK))
    at_once = max(1, min(40, count // _LEAST))
    with contextlib.suppress(OSError):  # an old kernel sends and receives them one by one
        target.setsockopt(socket.IPPROTO_UDP, _UDP_GRO, 1)
        origin.setsockopt(socket.IPPROTO_UDP, _UDP_SEGMENT, _PAYLOAD)
    target.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
    origin.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, max(16 << 10, int(asked / 8 * 0.02)))  # while it has no core
    stop, chunks = threading.Event(), count // at_once

    def send() -> None:
        for _ in range(chunks):
            if not stop.is_set():
                origin.send(bytes(_PAYLOAD * at_once))

    sender = threading.Thread(target=send)
    sender.start()
    arrivals: list[tuple[float, int]] = []
    expected = chunks * at_once * _PAYLOAD
    with contextlib.suppress(TimeoutError):
        while expected > 0 and (not arrivals or arrivals[-1][0] < arrivals[0][0] + 3 * _SECONDS):
            arrived, packet = _receive(target)
            arrivals.append((arrived, len(packet)))
            expected -= len(packet)
    stop.set()
    sender.join()
    used = arrivals[len(arrivals) // 5 :]
    if len(used) < 2:
        return 0.0
    return 8 * sum(size for _, size in used[1:]) * _ON_THE_LINK / _PAYLOAD / (used[-1][0] - used[0][0])
