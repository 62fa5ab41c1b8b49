"""Slows down what an interface of this machine sends while a command runs; run it on each node for both directions.

A guard, a process of its own, undoes the change as soon as this one ends, even by SIGKILL.
"""

import contextlib
import errno
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from titan_planner.netem import relay
from titan_planner.netem.sites import shaping
from torchtitan.refusal import Refusal

_TAP, _HANDLE, _PREFERENCE = "ttnetem", "7e7e:", "pref 32382"  # nothing else on a machine uses these names
_TAP_SECONDS = 5.0
_SOL_PACKET, _PACKET_VNET_HDR, _PACKET_QDISC_BYPASS, _ETH_P_ALL = 263, 15, 20, 3


def run(interface: str, gbit: float | None, delay_ms: float, command: Sequence[str]) -> int:
    if interface not in (known := [name for _, name in socket.if_nameindex()]):
        raise Refusal(f"--interface {interface} is not on this machine; use one of {', '.join(known)}")
    if not gbit or gbit <= 0 or delay_ms < 0:
        raise Refusal(f"--gbit {gbit} and --delay_ms {delay_ms}: give a rate above 0, and a delay that is not below 0")
    undo(interface)  # what a guard could not undo, because it was killed, too
    _refuse_foreign(interface)
    words = [sys.executable, "-m", "titan_planner.netem.interface", interface]
    guard = subprocess.Popen(words, stdin=subprocess.PIPE, start_new_session=True)
    assert guard.stdin is not None
    try:
        _slow_down(interface, gbit * 1e9, delay_ms / 1e3)
        process = subprocess.Popen(command, start_new_session=True)

        def pass_on(number: int, _: object) -> None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)

        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, pass_on)
        code = process.wait()
        return code if code >= 0 else 128 - code
    finally:
        guard.stdin.close()
        guard.wait()


def undo(interface: str) -> None:
    """Remove what this tool added, and nothing else."""
    if f"htb {_HANDLE}" in _tc("qdisc", "show", "dev", interface):
        _tc("qdisc", "del", "dev", interface, "root")
    if _PREFERENCE in _tc("filter", "show", "dev", interface, "egress"):
        _tc("qdisc", "del", "dev", interface, "clsact")


def _refuse_foreign(interface: str) -> None:
    shown = _tc("qdisc", "show", "dev", interface)
    own = [line for line in shown.splitlines() if "clsact" in line or (" root" in line and not line.split()[2] == "0:")]
    if own:
        raise Refusal(
            f"{interface} is shaped already ({own[0].strip()}); remove that first: tc qdisc del dev {interface} root"
        )


def _slow_down(interface: str, rate: float, delay: float) -> None:
    room, root = min(1 << 29, int((2 * delay + 0.1) * rate / 8)), f"root handle {_HANDLE} htb default 1"
    _must("qdisc", "replace", "dev", interface, *root.split())
    done = subprocess.run(
        ["tc", "-batch", "-"], input=_lines(interface, rate, delay, room), capture_output=True, text=True
    )
    if done.returncode == 0:
        return
    if not delay:
        raise Refusal(f"tc cannot shape {interface}: {done.stderr.strip()}; this kernel lacks HTB (CONFIG_NET_SCH_HTB)")
    _tc("qdisc", "del", "dev", interface, "root")  # no netem: a relay takes what is sent, and sends it later
    try:
        tap = _open_tap()
    except OSError as error:
        raise Refusal(f"this kernel has no netem, and /dev/net/tun does not open ({error}); load one of them") from None
    Path(f"/proc/sys/net/ipv6/conf/{_TAP}/disable_ipv6").write_text("1")
    shown = subprocess.run(["ip", "-o", "link", "show", interface], capture_output=True, text=True).stdout.split()
    mtu = shown[shown.index("mtu") + 1]
    subprocess.run(["ip", "link", "set", _TAP, "mtu", mtu, "up"], check=True)
    _must("qdisc", "replace", "dev", _TAP, *root.split())
    subprocess.run(["tc", "-batch", "-"], input=_lines(_TAP, rate, 0.0, room), text=True, check=True)
    wire = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    wire.bind((interface, 0))
    for option in (_PACKET_VNET_HDR, _PACKET_QDISC_BYPASS):
        wire.setsockopt(_SOL_PACKET, option, 1)
    relay.start({tap: {"": (wire.detach(), delay)}})
    _must("qdisc", "add", "dev", interface, "clsact")
    match = f"egress protocol all {_PREFERENCE} u32 match u32 0 0 action mirred egress redirect dev {_TAP}"
    _must("filter", "add", "dev", interface, *match.split())


def _open_tap() -> int:
    """The relay of a command that was just killed may still hold it."""
    end = time.monotonic() + _TAP_SECONDS
    while True:
        try:
            return relay.open_device(_TAP, with_ethernet=True)
        except OSError as error:
            if error.errno != errno.EBUSY or time.monotonic() > end:
                raise
            time.sleep(0.05)


def _lines(device: str, rate: float, delay: float, room: int) -> str:
    return "\n".join(shaping(f"dev {device}", 1, rate, delay, room)).replace(" 1:", f" {_HANDLE}") + "\n"


def _tc(*words: str) -> str:
    return subprocess.run(["tc", *words], capture_output=True, text=True).stdout


def _must(*words: str) -> None:
    done = subprocess.run(["tc", *words], capture_output=True, text=True)
    if done.returncode:
        raise Refusal(f"tc {' '.join(words)}: {done.stderr.strip()}; be root, with HTB, clsact and u32 in the kernel")


if __name__ == "__main__":
    for ignored in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    sys.stdin.read()
    undo(sys.argv[1])
