"""The addresses of this node: which one leads to another machine, and which one gloo would choose.

Only the standard library, and only on Linux: elsewhere the interfaces have no names.
"""

import contextlib
import ipaddress
import socket
import struct
import sys
from collections.abc import Mapping
from pathlib import Path

from torchtitan.refusal import Refusal

_SIOCGIFADDR = 0x8915
_TUNNELS = {"65534", "768", "769", "778", "823"}  # kinds of Linux: none (WireGuard, tun), IP in IP, GRE


def own_addresses() -> dict[str, str]:
    """Each address of this machine, with the name of its interface."""
    found = {}
    if sys.platform == "linux":
        import fcntl

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
            for _, name in socket.if_nameindex():
                with contextlib.suppress(OSError):  # this interface has no IPv4 address
                    answer = fcntl.ioctl(s.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()))
                    found[socket.inet_ntoa(answer[20:24])] = name
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, *_, name = line.split()
            found[str(ipaddress.IPv6Address(bytes.fromhex(digits)))] = name
    return found


def in_words(addresses: Mapping[str, str]) -> str:
    """`eth0 (10.0.0.1), eth1 (10.1.0.1)`, without loopback and link-local addresses."""
    known = [f"{name} ({address})" for address, name in addresses.items() if not is_local(address)]
    return ", ".join(known) or "no address but its own loopback"


def is_local(address: str) -> bool:
    """Whether an address has no meaning outside its own machine or link: loopback, or link-local."""
    plain = ipaddress.ip_address(address.partition("%")[0])
    return plain.is_loopback or plain.is_link_local


def interface_of(address: str | None, addresses: Mapping[str, str]) -> str:
    """The interface that has the address; ? if `addresses` does not list it."""
    if address is not None and ipaddress.ip_address(address.partition("%")[0]).is_loopback:
        return "lo"
    return addresses.get(address or "", "?")


def leads_here(host: str, addresses: Mapping[str, str]) -> bool:
    """Whether a host name or address means this machine."""
    with contextlib.suppress(OSError):
        found = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0][4][0]
        return interface_of(str(found), addresses) != "?"
    return False


def split_endpoint(endpoint: str) -> tuple[str, int]:
    host, _, port = endpoint.rpartition(":")
    return host.strip("[]"), int(port)


def address_toward(host: str) -> str | None:
    """This machine's own address on the route to `host`; None if there is no route, or no such name."""
    with contextlib.suppress(OSError):
        family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as s:
            s.connect(address)  # on a datagram socket this looks up the route and sends nothing
            return str(s.getsockname()[0])
    return None


def gloo_address(env: Mapping[str, str], addresses: Mapping[str, str]) -> str:
    """Where gloo will listen, by its own rule: GLOO_SOCKET_IFNAME, else the host name's address, else loopback."""
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
    """Refuse an NCCL_SOCKET_IFNAME that leaves no interface: a list of prefixes, =exact names, or ^names to exclude."""
    named = env.get("NCCL_SOCKET_IFNAME", "")
    words = [word.strip() for word in named.lstrip("^=").split(",")]
    exact = named.lstrip("^").startswith("=")
    fits = {n for n in addresses.values() for word in words if n == word or (not exact and n.startswith(word))}
    if named and not (set(addresses.values()) - fits if named.startswith("^") else fits):
        raise Refusal(
            f"NCCL_SOCKET_IFNAME = {named} leaves no interface of this node; use one of {in_words(addresses)}"
        )


def way_to_head(head: str) -> tuple[str, str] | None:
    """This node's address and interface toward the head if its host name means another way; else None.

    On Debian the name means 127.0.1.1, and gloo would wait past its own timeout. If a tunnel such as WireGuard's leads
    to the head, the name means the network outside the tunnel, where the other nodes cannot be reached.
    """
    addresses = own_addresses()
    toward = address_toward(split_endpoint(head)[0])
    if toward is None or toward not in addresses or is_local(toward):
        return None
    named = gloo_address({}, addresses)
    means_another = is_local(named) or (named != toward and is_tunnel(addresses[toward]))
    return (toward, addresses[toward]) if means_another else None


def is_tunnel(interface: str) -> bool:
    """Whether an interface has no hardware beneath, as those of WireGuard, Tailscale, OpenVPN, ZeroTier and VXLAN."""
    about = Path("/sys/class/net") / interface
    with contextlib.suppress(OSError):
        is_bare = (about / "type").read_text().strip() in _TUNNELS
        return is_bare or (about / "tun_flags").exists() or "DEVTYPE=vxlan" in (about / "uevent").read_text()
    return False
