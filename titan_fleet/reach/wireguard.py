"""The network's interface on this node: WireGuard of the kernel, or wireguard-go where the kernel has none.

The private key is made here, given to `wg` over standard input, and never written anywhere.
"""

import ipaddress
import json
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from torchtitan.refusal import Refusal

OVERHEAD = 80  # bytes that WireGuard adds over IPv6; over IPv4 60


def require_programs() -> None:
    if missing := [name for name in ("ip", "wg") if shutil.which(name) is None]:
        raise Refusal(f"{', '.join(missing)} is not on this machine; apt install iproute2 wireguard-tools")


def new_keys() -> tuple[str, str]:
    private = _run(["wg", "genkey"]).strip()
    return private, _run(["wg", "pubkey"], private).strip()


def address_in(given: str, number: int, host: str, interface: str) -> tuple[ipaddress.IPv4Network, str]:
    """The network that the serving machine names, and this node's address; it can take none that are in use here."""
    network, fix = ipaddress.IPv4Network(given), "start `reach serve` with another --network"
    if network.is_global or network.is_loopback or network.is_link_local or network.is_reserved or network.is_multicast:
        raise Refusal(f"the network {network} of {host} is not a private one; {fix}")
    for route in json.loads(_run(["ip", "-4", "-j", "route"]) or "[]"):
        if route["dst"] != "default" and route.get("dev") != interface:
            if ipaddress.IPv4Network(route["dst"], strict=False).overlaps(network):
                raise Refusal(f"the network {network} of {host} has addresses of {route['dst']}, which is here; {fix}")
    return network, str(network[number])


class Interface:
    def __init__(self, name: str) -> None:
        self.name, self.is_up = name, False
        self._reached: set[str] = set()  # peers that have had an endpoint

    def bring_up(self, private: str, port: int, address: str, prefix: int, mtu: int) -> None:
        if Path(f"/sys/class/net/{self.name}").exists():
            raise Refusal(f"the interface {self.name} is there already, and is not reach's; give another --interface")
        made = subprocess.run(["ip", "link", "add", self.name, "type", "wireguard"], capture_output=True, text=True)
        if made.returncode:
            if shutil.which("wireguard-go") is None:
                raise Refusal(
                    f"this kernel has no WireGuard ({made.stderr.strip()}); load it, or apt install wireguard-go"
                )
            _run(["wireguard-go", self.name])
        self.is_up = True
        _run(["wg", "set", self.name, "listen-port", str(port), "private-key", "/dev/stdin"], private)
        _run(["ip", "address", "add", f"{address}/{prefix}", "dev", self.name])
        _run(["ip", "link", "set", self.name, "mtu", str(mtu), "up"])

    def set_peer(self, public: str, addresses: Sequence[str], endpoint: str | None, keepalive: int) -> None:
        """A peer greets at once when it gets its first endpoint.

        WireGuard greets once in 5 s, also if it does not know to whom. So a peer without an endpoint sends nothing by
        itself, and one that may have greeted in vain, for a program's packet, is made anew.
        """
        anew = [] if endpoint is None or public in self._reached else ["peer", public, "remove"]
        words = ["peer", public, "allowed-ips", ",".join(f"{address}/32" for address in addresses)]
        if endpoint:
            words += ["persistent-keepalive", str(keepalive), "endpoint", endpoint]
            self._reached.add(public)
        _run(["wg", "set", self.name, *anew, *words])

    def pass_on(self, is_hub: bool) -> None:
        """Whether this node forwards between the others. The setting goes with the interface."""
        try:
            for name, value in (("forwarding", str(int(is_hub))), ("send_redirects", "0")):
                Path(f"/proc/sys/net/ipv4/conf/{self.name}/{name}").write_text(value)
        except OSError as error:
            raise Refusal(f"this node cannot pass on: {error}; choose another for `serve --through`") from None

    def remove_peer(self, public: str) -> None:
        self._reached.discard(public)
        _run(["wg", "set", self.name, "peer", public, "remove"])

    def remove(self) -> None:
        """wireguard-go ends with its interface."""
        subprocess.run(["ip", "link", "delete", self.name], capture_output=True)
        self.is_up = False


def _run(words: Sequence[str], text: str | None = None) -> str:
    done = subprocess.run(words, input=text or "", capture_output=True, text=True)
    if done.returncode:
        raise Refusal(
            f"{' '.join(words)}: {done.stderr.strip()}; be root, and see that no other interface is in the way"
        )
    return done.stdout
