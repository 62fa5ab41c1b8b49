"""The network interface that leads to the head node, where a machine's own name leads nowhere.

gloo, which carries what is on hosts, listens on the address that its machine's name has. Debian and Ubuntu write
127.0.1.1 beside that name in /etc/hosts: the other nodes then look for this one on themselves.
"""

import fcntl
import ipaddress
import socket
import struct
from pathlib import Path

_SIOCGIFADDR = 0x8915  # linux/sockios.h: an interface's first address
_IF_INET6 = Path("/proc/net/if_inet6")


def for_gloo(head: str) -> str:
    """What GLOO_SOCKET_IFNAME has to be to reach host:port; "" where gloo does well without, or nothing is found."""
    host, _, port = head.rpartition(":")
    try:
        if _is_reached_by_name(socket.gethostname()):
            return ""
        local = _address_toward(host.strip("[]"), int(port))
        return "" if ipaddress.ip_address(local).is_loopback else interface_of(local)
    except OSError:
        return ""


def _is_reached_by_name(name: str) -> bool:
    """gloo takes the first address that it can listen on."""
    try:
        found = socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM)
    except OSError:  # a name without an address
        return False
    for family, kind, _, _, address in found:
        with socket.socket(family, kind) as listener:
            try:
                listener.bind(address)
            except OSError:
                continue
            return not ipaddress.ip_address(address[0]).is_loopback
    return False


def _address_toward(host: str, port: int) -> str:
    """Of this machine, as the routes have it; connecting a datagram socket sends nothing."""
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str:
    """The interface that has this address."""
    wanted = ipaddress.ip_address(address.partition("%")[0])
    if wanted.version == 6:
        lines = [line.split() for line in _IF_INET6.read_text().splitlines()]
        return next((words[-1] for words in lines if bytes.fromhex(words[0]) == wanted.packed), "")
    return next((name for _, name in socket.if_nameindex() if address_of(name) == address), "")


def address_of(interface: str) -> str:
    """Its first of IPv4; "" where it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        try:
            answer = fcntl.ioctl(s, _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        except OSError:
            return ""
    return socket.inet_ntoa(answer[20:24])
