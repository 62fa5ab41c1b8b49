"""One pair, seen from this node: it writes to the other until an answer comes, and goes on asking while it is used."""

import hashlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from titan_fleet.reach import messages
from titan_fleet.reach.routers import Endpoint, Router, to_endpoint, told

_BURST_SECONDS, _FAST, _SLOW, _RARE = 3.0, 0.2, 2.0, 10.0
_LOST_SECONDS = 6.5  # without an answer on a direct way: three questions in a row
_HOPELESS_SECONDS = 120.0  # after news, then a way that did not open is tried rarely
_MOST_CANDIDATES = 12

Send = Callable[[bytes, Endpoint], None]


@dataclass
class Peer:
    name: str
    number: int
    own: int  # this node's number
    address: str  # in the network
    public: str
    serial: str  # of its certificate
    key: bytes
    candidates: list[Endpoint]
    router: Router
    endpoint: Endpoint | None = None  # of the direct way, while it is open
    news_at: float = field(default_factory=time.monotonic)
    asked_at: float = 0.0
    answered_at: float = 0.0  # on the direct way
    fresh: messages.Fresh = field(default_factory=messages.Fresh)  # of the other's questions
    waiting: dict[int, Endpoint] = field(default_factory=dict)
    way: str = ""  # direct, relayed, carried, through
    may_go_through: bool = False  # the node that the serving machine chose
    used: str = ""  # the endpoint that WireGuard was given
    reason: str = ""
    heard_at: float = 0.0  # through the tunnel
    is_silent: bool = False
    made_at: float = field(default_factory=time.monotonic)
    relay_asked_at: float = 0.0

    def session_of(self, sender: int) -> bytes:
        """Each direction has its own, so that no datagram can be sent back as an answer to itself."""
        return hashlib.sha256(self.key + sender.to_bytes(2, "big")).digest()[: messages.SESSION_BYTES]

    def unseal(self, data: bytes) -> messages.Datagram | None:
        return messages.unseal(data, lambda session: self.key if session == self.session_of(self.number) else None)

    @property
    def leads_over(self) -> bool:
        return self.own < self.number

    @property
    def is_trying(self) -> bool:
        return self.endpoint is None and time.monotonic() < self.news_at + _BURST_SECONDS

    def take_news(self, message: Mapping[str, Any], public: str) -> None:
        """Where the other is now."""
        candidates = [to_endpoint(*given) for given in message["candidates"][:_MOST_CANDIDATES]]
        key = bytes.fromhex(message["key"])
        if candidates != self.candidates or key != self.key or public != self.public:
            self.news_at, self.asked_at = time.monotonic(), 0.0
        self.fresh = self.fresh if key == self.key else messages.Fresh()
        self.candidates, self.key, self.public = candidates, key, public
        self.router = told(message["router"])

    def tick(self, send: Send) -> None:
        """Ask if it is time; a way that gives no answer any more is lost."""
        now = time.monotonic()
        if self.endpoint is not None and now > self.answered_at + _LOST_SECONDS:
            self.endpoint, self.news_at = None, now
        since = now - self.news_at
        pause = _FAST if since < _BURST_SECONDS else _SLOW
        pause = _RARE if self.endpoint is None and since > _HOPELESS_SECONDS else pause
        if now < self.asked_at + pause:
            return
        self.asked_at = now
        for to in [self.endpoint] if self.endpoint and since > _BURST_SECONDS else self.candidates:
            data, counter = messages.seal(self.key, self.session_of(self.own), messages.PUNCH)
            self.waiting[counter] = to
            send(data, to)
        for counter in list(self.waiting)[:-64]:
            del self.waiting[counter]

    def take(self, found: messages.Datagram, origin: Endpoint, send: Send) -> None:
        """A question of the other gets an answer to where it came from; an answer to ours opens the way."""
        if found.kind == messages.PUNCH and self.fresh.take(found.counter):
            send(
                messages.seal(self.key, self.session_of(self.own), messages.ACK, b"", found.counter, messages.ANSWER)[
                    0
                ],
                origin,
            )
            if self.endpoint is None and origin not in self.candidates:  # a router that changes ports
                self.candidates = [*self.candidates[-_MOST_CANDIDATES:], origin]
                self.asked_at = 0.0
        elif found.kind == messages.ACK and self.waiting.pop(found.counter, None) is not None:
            if self.answered_at < self.news_at:  # where the other is now, not where it was
                self.endpoint = origin
            if origin == self.endpoint:
                self.answered_at = time.monotonic()
