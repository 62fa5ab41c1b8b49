"""Delays packets, where the kernel cannot: a process that reads them from one device and later writes them to another.

Packets keep the header with which the kernel describes 64 KB as one, so a few thousand of them a second are enough.
"""

import contextlib
import fcntl
import heapq
import json
import os
import select
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_TUN, _TAP, _NO_PACKET_INFO, _VNET_HEADER = 0x1, 0x2, 0x1000, 0x4000
_CHECKSUM_AND_TCP, _UDP = 0x1 | 0x2 | 0x4, 0x20 | 0x40  # which packets may be longer than the MTU
_HEADER = 10  # bytes of the kernel's description before each packet
_DESTINATION = slice(_HEADER + 16, _HEADER + 20)  # in an IPv4 packet
_READS = 64  # from a device, before packets that are due are written

Routes = Mapping[int, Mapping[str, tuple[int, float]]]  # descriptor -> destination ("": any) -> descriptor, seconds


def open_device(name: str, with_ethernet: bool = False) -> int:
    """Make a TUN device (TAP: with Ethernet headers) in this thread's namespace; it ends with its descriptor."""
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    kind = (_TAP if with_ethernet else _TUN) | _NO_PACKET_INFO | _VNET_HEADER
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", name.encode(), kind))
    for offload in (_CHECKSUM_AND_TCP | _UDP, _CHECKSUM_AND_TCP):
        with contextlib.suppress(OSError):  # before Linux 6.2 the kernel cuts UDP itself
            fcntl.ioctl(device, _TUNSETOFFLOAD, offload)
            break
    return device


def start(routes: Routes) -> "subprocess.Popen[str]":
    """The relay as a process of its own, which ends with this one."""
    ends = {way[0] for ways in routes.values() for way in ways.values()} | set(routes)
    command = [sys.executable, "-m", "titan_planner.netem.relay"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, text=True, pass_fds=sorted(ends), start_new_session=True)
    assert process.stdin is not None
    process.stdin.write(json.dumps(routes) + "\n")
    process.stdin.flush()
    for end in ends:
        os.close(end)
    return process


def relay(routes: Routes, until: int) -> None:
    """Until this descriptor can be read."""
    tables = {int(end): {_bytes(to): way for to, way in ways.items()} for end, ways in routes.items()}
    waiting: list[tuple[float, int, int, bytes]] = []
    watched, number = [*tables, until], 0
    while True:
        rest = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        ready: Sequence[int] = select.select(watched, [], [], rest)[0]
        if until in ready:
            return
        for end in ready:
            table = tables[end]
            now = time.monotonic()
            with contextlib.suppress(BlockingIOError):
                for _ in range(_READS):
                    packet = os.read(end, 70000)
                    way = table.get(packet[_DESTINATION]) or table.get(b"")
                    if way:
                        number += 1
                        heapq.heappush(waiting, (now + way[1], number, way[0], packet))
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            _, _, end, packet = heapq.heappop(waiting)
            with contextlib.suppress(OSError):  # a full queue drops packets, as a router does
                os.write(end, packet)


def _bytes(address: str) -> bytes:
    return socket.inet_aton(address) if address else b""


if __name__ == "__main__":
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, -20)  # else a packet waits for the ranks that compute
    relay(json.loads(sys.stdin.readline()), sys.stdin.fileno())
