"""Datagrams from and to the UDP port that WireGuard holds, beside it: raw sockets, so that only root can.

A router knows a program by its port. Probes from WireGuard's own port therefore open the way that WireGuard then
uses, and go on testing it while it is used. WireGuard drops what is not its own.
"""

import asyncio
import contextlib
import ctypes
import ipaddress
import socket
import struct
from collections.abc import Callable

from titan_fleet.reach.messages import MAGIC
from torchtitan.launch.addresses import address_toward, is_tunnel, own_addresses

_SO_ATTACH_FILTER, _IPV6_CHECKSUM = 26, 7
_UDP = struct.Struct("!HHHH")
_LOAD_LENGTH, _HALF, _WORD, _EQUAL, _RETURN = 0xB1, 0x48, 0x40, 0x15, 0x06  # of the kernel's packet filter


class Port:
    def __init__(self, number: int, take: Callable[[bytes, tuple[str, int]], None], server: str) -> None:
        self.number, self._take, self._server = number, take, server
        self._raw: dict[int, socket.socket] = {}
        for family in (socket.AF_INET, socket.AF_INET6):
            with contextlib.suppress(OSError):  # a machine without IPv6
                raw = socket.socket(family, socket.SOCK_RAW, socket.IPPROTO_UDP)
                _filter(raw, number)
                raw.setblocking(False)
                if family == socket.AF_INET6:
                    raw.setsockopt(socket.IPPROTO_IPV6, _IPV6_CHECKSUM, 6)
                self._raw[family] = raw
                asyncio.get_running_loop().add_reader(raw, self._read, raw)

    def send(self, data: bytes, to: tuple[str, int]) -> None:
        """Nothing happens where there is no way: whoever sends waits for an answer anyway."""
        head = [self.number, to[1], _UDP.size + len(data), 0]
        if (family := socket.AF_INET6 if ":" in to[0] else socket.AF_INET) not in self._raw:
            return
        own = address_toward(to[0])
        if self._is_beside(own):
            return
        if family == socket.AF_INET and own is not None:
            head[3] = _checksum(own, to[0], _UDP.pack(*head) + data)
        with contextlib.suppress(OSError, ValueError, TypeError):
            self._raw[family].sendto(_UDP.pack(*head) + data, (to[0], 0))

    @property
    def uplink(self) -> str:
        """The interface that leads to the serving machine, so no tunnel beside ours."""
        return own_addresses().get(address_toward(self._server) or "", "")

    def _is_beside(self, own: str | None) -> bool:
        """Whether another tunnel leads there, from this address of ours: two that carry each other stand still."""
        return is_beside(own_addresses().get(own or "", ""), self.uplink)

    def _read(self, raw: socket.socket) -> None:
        with contextlib.suppress(OSError):
            data, (address, *_) = raw.recvfrom(2048)
            begin = (data[0] & 15) * 4 if raw.family == socket.AF_INET else 0
            if len(data) >= begin + _UDP.size and not self._is_beside(address_toward(address)):
                self._take(data[begin + _UDP.size :], (address, _UDP.unpack_from(data, begin)[0]))

    def close(self) -> None:
        for raw in self._raw.values():
            asyncio.get_running_loop().remove_reader(raw)
            raw.close()


def is_beside(interface: str, uplink: str) -> bool:
    """Whether an interface is a tunnel, and not the one by which all else leaves this machine."""
    return interface != uplink and is_tunnel(interface)


def _filter(raw: socket.socket, number: int) -> None:
    """Only probes to this port; WireGuard's own packets are many."""
    magic = int.from_bytes(MAGIC, "big")
    begin = [(_LOAD_LENGTH, 0, 0, 0)] if raw.family == socket.AF_INET else [(0x01, 0, 0, 0)]
    rows = [*begin, (_HALF, 0, 0, 2), (_EQUAL, 0, 3, number), (_WORD, 0, 0, 8), (_EQUAL, 0, 1, magic)]
    rows += [(_RETURN, 0, 0, 0xFFFF), (_RETURN, 0, 0, 0)]
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *row) for row in rows))
    raw.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HP", len(rows), ctypes.addressof(program)))


def _checksum(own: str, to: str, text: bytes) -> int:
    whole = ipaddress.ip_address(own).packed + ipaddress.ip_address(to).packed
    whole += struct.pack("!HH", socket.IPPROTO_UDP, len(text)) + text
    total = sum(struct.unpack(f"!{(len(whole) + 1) // 2}H", whole + b"\0" * (len(whole) % 2)))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF or 0xFFFF
