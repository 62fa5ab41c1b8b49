"""How much one address may ask for: requests, attempts to log in, sockets, messages, bytes of a body."""

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from starlette.types import Message, Receive, Scope

from torchtitan.refusal import Refusal

MOST_BODY_BYTES = 2**20
_MOST_ADDRESSES = 10_000
_MOST_SOCKETS, _MOST_SOCKETS_OF_ONE = 200, 40
_PAGE_COST = 5  # a page keeps memory until its browser has gone


class Denied(Refusal):
    """A request that gets nothing but this status and sentence."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


@dataclass
class Bucket:
    """`rate` a second, and `burst` at once."""

    rate: float
    burst: float
    _left: dict[str, tuple[float, float]] = field(default_factory=dict)

    def take(self, key: str, cost: float = 1.0) -> None:
        now = time.monotonic()
        left = self._now(key, now)
        if left < cost:
            raise Denied(429, f"{key} asks too often; wait {(cost - left) / self.rate:.0f} s")
        if len(self._left) >= _MOST_ADDRESSES:
            self._left.clear()
        self._left[key] = left - cost, now

    def _now(self, key: str, now: float) -> float:
        left, then = self._left.get(key, (self.burst, now))
        return min(self.burst, left + (now - then) * self.rate)


@dataclass
class Limits:
    requests: Bucket = field(default_factory=lambda: Bucket(rate=40, burst=400))
    attempts: Bucket = field(default_factory=lambda: Bucket(rate=0.1, burst=10))  # wrong tokens
    messages: Bucket = field(default_factory=lambda: Bucket(rate=100, burst=1000))  # of sockets
    sockets: Counter[str] = field(default_factory=Counter)

    def take(self, scope: Scope, headers: Mapping[str, str]) -> None:
        """Static files are not counted: a page has many, and they cost nothing."""
        if not scope["path"].startswith("/_nicegui/"):
            is_page = "text/html" in headers.get("accept", "")
            self.requests.take(address_of(scope), _PAGE_COST if is_page else 1)

    def open_socket(self, address: str) -> bool:
        if self.sockets.total() >= _MOST_SOCKETS or self.sockets[address] >= _MOST_SOCKETS_OF_ONE:
            return False
        self.sockets[address] += 1
        return True

    def close_socket(self, address: str) -> None:
        self.sockets[address] -= 1
        if not self.sockets[address]:
            del self.sockets[address]


def address_of(scope: Scope) -> str:
    return str((scope.get("client") or ("",))[0])


def within_size(receive: Receive, headers: Mapping[str, str]) -> Receive:
    """The body, as far as it is not too large; the length that is announced is looked at first."""
    announced = headers.get("content-length", "0")
    if not announced.isdecimal() or int(announced) > MOST_BODY_BYTES:
        raise Denied(413, f"the body has more than {MOST_BODY_BYTES} bytes; send less")
    taken = 0

    async def bounded() -> Message:
        nonlocal taken
        message = await receive()
        taken += len(message.get("body", b""))
        if taken > MOST_BODY_BYTES:
            raise Denied(413, f"the body has more than {MOST_BODY_BYTES} bytes; send less")
        return message

    return bounded
