"""Decisions: what kind of router a node is behind, and which way a pair of nodes has. Pure; each gives its reason.

RFC 4787's words: a router's *mapping* is the outside port that it picks for a program's socket, the same for all
destinations or another for each. Its *filtering* says which answers it lets in: from anyone, from an address that was
written to, or only from an address and port that was written to.
"""

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Endpoint = tuple[str, int]
SAME, OTHER = "one port for all", "another port for each destination"
_INSIDE = [ipaddress.ip_network(each) for each in ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10")]
ANYONE, ADDRESS, PORT = "anyone", "addresses written to", "ports written to"

_WORDS = {
    "none": "no router: others reach this machine directly",
    "firewall": "a firewall without translation: it lets in what was written to",
    "open": "an open router: it lets others in",
    "keeps": "a router that keeps one port for all destinations",
    "changes": "a router that takes another port for each destination",
    "no UDP": "no UDP passes to the serving machine and back",
}


@dataclass(frozen=True)
class Seen:
    """What a node's probes brought: sockets of its own and the answers of the serving machine."""

    own: Endpoint  # of the socket, as this machine knows it
    mapped: Sequence[Endpoint] = ()  # of the same socket, as each port and address of the serving machine saw it
    from_port: bool = False  # an answer came from a port that had not been written to
    from_address: bool | None = None  # and from such an address; None: the serving machine has only one
    hops: Sequence[str] = ()  # addresses of the first routers on the way, as far as they say so


@dataclass(frozen=True)
class Router:
    kind: str  # of _WORDS
    mapping: str = ""
    filtering: str = ""
    count: int = 0  # routers in a row that have an address of their own network
    reason: str = field(default="", compare=False)

    @property
    def in_words(self) -> str:
        many = f" ({self.count} routers in a row)" if self.count > 1 else ""
        return _WORDS[self.kind] + many


def judge(seen: Seen) -> Router:
    """Which router stands between."""
    count = sum(any(ipaddress.ip_address(hop) in network for network in _INSIDE) for hop in seen.hops)
    if not seen.mapped:
        return Router("no UDP", count=count, reason="no probe was answered")
    mapping = SAME if len(set(seen.mapped)) == 1 else OTHER
    tells = seen.from_port if seen.from_address is None else seen.from_address  # as far as one address can tell
    filtering = ANYONE if tells else ADDRESS if seen.from_port else PORT
    looks = f"{seen.own[0]}:{seen.own[1]} is seen as {', '.join(f'{a}:{p}' for a, p in dict.fromkeys(seen.mapped))}"
    reason = f"{looks}; answers come in from {filtering}"
    if mapping == SAME and seen.mapped[0] == seen.own:
        kind = "none" if filtering == ANYONE else "firewall"
        return Router(kind, mapping, filtering, 0, reason)
    kind = "changes" if mapping == OTHER else "open" if filtering == ANYONE else "keeps"
    return Router(kind, mapping, filtering, max(1, count), reason)


def can_open(one: Router, other: Router) -> tuple[bool, str]:
    """Whether two nodes can write to each other, if both begin at the same time."""
    for router in (one, other):
        if router.kind == "no UDP":
            return False, "one of the two has no UDP"
    changing = [router for router in (one, other) if router.mapping == OTHER]
    if not changing:
        return True, "both keep one port for all, so each knows where to write"
    if len(changing) == 2:
        return False, "both routers take another port for each destination, so neither knows where to write"
    fixed = other if changing[0] is one else one
    if fixed.filtering == PORT:
        return False, "one router takes a new port for each destination, and the other lets in only ports written to"
    return True, f"one router takes a new port for each destination, but the other lets in {fixed.filtering}"


def to_endpoint(address: Any, port: Any) -> Endpoint:
    """What another node says of where it is. A ValueError, if nothing can be there."""
    if type(port) is not int or not 0 < port < 2**16:
        raise ValueError(f"{port!r} is no port")
    if not isinstance(address, str) or "%" in address:  # a scope means nothing elsewhere
        raise ValueError(f"{address!r:.80} is no address")
    return str(ipaddress.ip_address(address)), port


def told(values: Mapping[str, Any]) -> Router:
    """What another node says of its router. A ValueError, if that is none of these words."""
    if type(count := values["count"]) is not int:
        raise ValueError(f"{count!r} is no number of routers")
    router = Router(str(values["kind"]), str(values["mapping"]), str(values["filtering"]), count)
    if router.kind not in _WORDS or {router.mapping, router.filtering} - {"", SAME, OTHER, ANYONE, ADDRESS, PORT}:
        raise ValueError(f"{router.kind!r} is no kind of router")
    return router


def keepalive(least: int, below: int | None) -> int:
    """Seconds between WireGuard's own packets, for a router that holds a silent way for `least` to `below` seconds."""
    usual = 25  # as WireGuard's authors advise
    return usual if below is None or least > usual else max(2, least * 2 // 3)


def choose_way(one: Router, other: Router, is_open: bool, has_udp: bool, through: str = "") -> tuple[str, str]:
    """direct, through (another node), relayed (over UDP) or carried (inside TLS), and why.

    `is_open`: each has answered the other. `through`: a node to which both have a direct way, if there is one.
    """
    expected, reason = can_open(one, other)
    if is_open:
        return "direct", reason if expected else "it opened, though it did not look like it"
    if expected:
        reason = f"it should open ({reason}), but no answer came: a firewall on the way, or the other is away"
    if through:
        return "through", f"{reason}; {through} is chosen to pass it on"
    return ("relayed" if has_udp else "carried"), reason
