"""What travels between the machines: bounded frames inside TLS, and sealed datagrams outside.

A datagram carries a session, a counter that only grows, and an HMAC under the session's key, which came over TLS.
Whatever is not sealed rightly, or not newer than the last one, is dropped without an answer.
"""

import asyncio
import hmac
import itertools
import json
import struct
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")
LARGEST = 1 << 16  # bytes of a frame
MAGIC = b"tTr1"  # WireGuard's own messages begin with 1 to 4, so it drops ours, and we drop its
SESSION_BYTES, _SEAL = 8, 16
_HEAD = struct.Struct(f"!4s{SESSION_BYTES}sBQ")
QUESTION, ANSWER = 192, 128  # an answer is never larger than its question

ASK, ASK_OTHER_PORT, ASK_OTHER_ADDRESS, ASK_LATER, BIND, REPLY, PUNCH, ACK = range(1, 9)
_counter = itertools.count(time.time_ns())


@dataclass(frozen=True)
class Datagram:
    session: bytes
    kind: int
    counter: int
    body: bytes


class Fresh:
    """Takes each counter once; one that comes late, by another way say, may still be among the last ones."""

    _WINDOW = 256

    def __init__(self) -> None:
        self._highest, self._taken = 0, 0  # and a bit for each of the last ones

    def take(self, counter: int) -> bool:
        ahead = counter - self._highest
        if ahead > 0:
            self._taken = (self._taken << ahead | 1) % (1 << self._WINDOW) if ahead < self._WINDOW else 1
            self._highest = counter
            return True
        if -ahead >= self._WINDOW or self._taken >> -ahead & 1:
            return False
        self._taken |= 1 << -ahead
        return True


def seal(
    key: bytes, session: bytes, kind: int, body: bytes = b"", counter: int | None = None, size: int = QUESTION
) -> tuple[bytes, int]:
    """The datagram, padded to `size`, and its counter."""
    number = next(_counter) if counter is None else counter
    text = _HEAD.pack(MAGIC, session, kind, number) + bytes([len(body)]) + body
    text = text.ljust(size - _SEAL, b"\0")
    return text + hmac.digest(key, text, "sha256")[:_SEAL], number


def unseal(data: bytes, key_of: Callable[[bytes], bytes | None]) -> Datagram | None:
    if len(data) < ANSWER or data[:4] != MAGIC:
        return None
    _, session, kind, counter = _HEAD.unpack_from(data)
    key = key_of(session)
    if key is None or not hmac.compare_digest(hmac.digest(key, data[:-_SEAL], "sha256")[:_SEAL], data[-_SEAL:]):
        return None
    begin = _HEAD.size + 1
    return Datagram(session, kind, counter, data[begin : begin + data[_HEAD.size]])


def frame(body: bytes) -> bytes:
    return struct.pack("!I", len(body)) + body


def as_frame(message: Mapping[str, Any]) -> bytes:
    return frame(json.dumps(message).encode())


async def within(seconds: float, wish: Coroutine[Any, Any, T]) -> T:
    """As `asyncio.wait_for`, which before Python 3.12 may lose a cancellation that comes together with the result."""
    task = asyncio.create_task(wish)
    try:
        if not (await asyncio.wait((task,), timeout=seconds))[0]:
            raise asyncio.TimeoutError
        return task.result()
    finally:
        task.cancel()


async def read_frame(reader: asyncio.StreamReader) -> bytes:
    (length,) = struct.unpack("!I", await reader.readexactly(4))
    if length > LARGEST:
        raise ConnectionError(f"a message of {length} bytes, where {LARGEST} are the most")
    return await reader.readexactly(length)


async def read_message(reader: asyncio.StreamReader) -> dict[str, Any]:
    try:
        message = json.loads(await read_frame(reader))
    except (ValueError, RecursionError):
        message = None
    if not isinstance(message, dict):
        raise ConnectionError("it sent something that is not a message")
    return message


def to_endpoint(address: str, port: int) -> str:
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
