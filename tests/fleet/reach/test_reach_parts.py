"""The decisions of reach, its messages, and a serving machine that answers only those who may ask."""

import argparse
import asyncio
import base64
import contextlib
import json
import os
import shutil
import signal
import socket
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from titan_fleet.reach import find, join, leave, measure, messages, port, proof, serve, server, wireguard
from titan_fleet.reach import node as node_module
from titan_fleet.reach.carry import Streams
from titan_fleet.reach.inside import Inside
from titan_fleet.reach.node import Node
from titan_fleet.reach.peer import Peer
from titan_fleet.reach.routers import (
    ADDRESS,
    ANYONE,
    OTHER,
    PORT,
    SAME,
    Router,
    Seen,
    can_open,
    choose_way,
    judge,
    keepalive,
    told,
)
from titan_fleet.reach.server import Server
from titan_fleet.swarm.certificates import context, make, revoke
from torchtitan.refusal import Refusal

HOME, OUT = ("192.168.1.2", 5000), ("203.0.113.5", 5000)
NONE, OPEN = Router("none", SAME, ANYONE), Router("open", SAME, ANYONE, 1)
KEEPS, CHANGES = Router("keeps", SAME, PORT, 1), Router("changes", OTHER, PORT, 1)
BY_ADDRESS, NO_UDP = Router("keeps", SAME, ADDRESS, 1), Router("no UDP")


@pytest.mark.parametrize(
    ("seen", "router"),
    [
        (Seen(OUT, [OUT, OUT], True, True), NONE),
        (Seen(OUT, [OUT, OUT], False, False), Router("firewall", SAME, PORT)),
        (Seen(HOME, [OUT, OUT], True, True), OPEN),
        (Seen(HOME, [OUT, OUT], True, None), OPEN),
        (Seen(HOME, [OUT, OUT], True, False), BY_ADDRESS),
        (Seen(HOME, [OUT, OUT], False, None), KEEPS),
        (Seen(HOME, [OUT, (OUT[0], 5001)], False, False), CHANGES),
        (Seen(HOME, [OUT, OUT], hops=["192.168.1.1", "100.64.0.1", "203.0.113.1"]), Router("keeps", SAME, PORT, 2)),
        (Seen(HOME), NO_UDP),
    ],
)
def test_a_router_is_named_by_what_it_does(seen: Seen, router: Router) -> None:
    assert judge(seen) == router
    assert ("2 routers in a row" in judge(seen).in_words) == (router.count == 2)


@pytest.mark.parametrize(
    ("one", "other", "opens"),
    [
        (KEEPS, KEEPS, True),
        (NONE, CHANGES, True),
        (OPEN, CHANGES, True),
        (BY_ADDRESS, CHANGES, True),
        (KEEPS, CHANGES, False),
        (CHANGES, CHANGES, False),
        (NONE, NO_UDP, False),
        (NO_UDP, NO_UDP, False),
    ],
)
def test_a_pair_opens_if_one_knows_where_to_write_and_the_other_lets_it_in(
    one: Router, other: Router, opens: bool
) -> None:
    assert can_open(one, other)[0] == can_open(other, one)[0] == opens


def test_what_was_seen_to_open_counts_more_than_what_was_expected() -> None:
    assert choose_way(KEEPS, KEEPS, True, True)[0] == "direct"
    assert choose_way(CHANGES, CHANGES, True, True) == ("direct", "it opened, though it did not look like it")
    way, reason = choose_way(KEEPS, KEEPS, False, True)
    assert way == "relayed" and "it should open" in reason and "firewall" in reason
    assert choose_way(CHANGES, KEEPS, False, True)[0] == "relayed"
    assert choose_way(NO_UDP, KEEPS, False, False)[0] == "carried"
    way, reason = choose_way(CHANGES, KEEPS, False, True, through="zurich")
    assert way == "through" and reason.endswith("zurich is chosen to pass it on")


def test_what_another_node_says_of_its_router_is_one_of_our_words() -> None:
    assert told(vars(CHANGES)) == CHANGES
    for wrong in ({"kind": "\x1b[2J"}, {"filtering": "all"}):
        with pytest.raises(ValueError, match="is no kind of router"):
            told(vars(CHANGES) | wrong)


def test_packets_are_sent_as_often_as_the_router_forgets() -> None:
    assert [keepalive(*held) for held in ((120, 180), (300, None), (20, 30), (10, 20), (0, 5))] == [25, 25, 13, 6, 2]


def test_a_datagram_is_taken_only_if_it_is_sealed_under_the_same_key() -> None:
    key, session = b"k" * 32, b"s" * messages.SESSION_BYTES
    data, counter = messages.seal(key, session, messages.ASK, b"body")
    found = messages.unseal(data, lambda session: key)
    assert found == messages.Datagram(session, messages.ASK, counter, b"body")
    assert len(messages.seal(key, session, messages.REPLY, b"x", size=messages.ANSWER)[0]) < len(data)
    for place in (4, 13, 40, len(data) - 1):
        assert messages.unseal(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :], lambda session: key) is None
    assert (
        messages.unseal(data, lambda session: None) is None and messages.unseal(data[:40], lambda session: key) is None
    )


def test_each_counter_counts_once_and_the_last_ones_may_come_late() -> None:
    fresh = messages.Fresh()
    assert [fresh.take(counter) for counter in (1000, 1002, 1001, 1001, 1002, 2000, 1003)] == [
        *(True, True, True),
        *(False, False, True, False),
    ]


def peer(own: int, number: int, candidates: list[Any]) -> Peer:
    return Peer(f"node-{number}", number, own, f"10.88.0.{number}", "", "", b"k" * 32, candidates, KEEPS)


def test_a_closed_terminal_ends_it_but_not_under_nohup() -> None:
    async def ended(number: int) -> bool:
        stop = asyncio.Event()
        serve.end_by_signals(stop.set)
        os.kill(os.getpid(), number)
        await asyncio.sleep(0.1)
        return stop.is_set()

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert not asyncio.run(ended(signal.SIGHUP)) and asyncio.run(ended(signal.SIGTERM))
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        assert asyncio.run(ended(signal.SIGHUP))
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("turns", range(6))
def test_a_message_that_comes_together_with_the_end_does_not_undo_it(turns: int) -> None:
    async def read() -> None:
        reader = asyncio.StreamReader()
        task = asyncio.create_task(messages.within(10, messages.read_message(reader)))
        await asyncio.sleep(0.01)
        reader.feed_data(messages.as_frame({"do": "beat"}))
        for _ in range(turns):
            await asyncio.sleep(0)
        if task.cancel():
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(read())


def test_two_peers_open_a_way_and_nothing_that_is_sent_back_does() -> None:
    one, other, sent = peer(1, 2, [("198.51.100.2", 1)]), peer(2, 1, [("198.51.100.1", 1)]), []
    one.tick(lambda data, to: sent.append((data, to)))
    ((question, to),) = sent
    assert to == ("198.51.100.2", 1) and one.unseal(question) is None  # its own, sent back
    found, answers = other.unseal(question), []
    assert found
    for _ in range(2):  # the second is a replay
        other.take(found, ("198.51.100.1", 7), lambda data, to: answers.append((data, to)))
    ((answer, to),) = answers
    assert to == ("198.51.100.1", 7) and ("198.51.100.1", 7) in other.candidates
    assert len(answer) <= len(question) and one.endpoint is None
    back = one.unseal(answer)
    assert back
    one.take(back, ("198.51.100.2", 1), lambda data, to: None)
    assert one.endpoint == ("198.51.100.2", 1)


def test_a_peer_whose_address_changes_is_followed_at_once_and_any_other_answer_is_not() -> None:
    one, other = peer(1, 2, [("198.51.100.2", 1)]), peer(2, 1, [])

    def ask(at: tuple[str, int]) -> None:
        def bring(question: bytes, to: object) -> None:
            other.take(
                other.unseal(question), ("198.51.100.1", 1), lambda data, to: one.take(one.unseal(data), at, print)
            )

        one.asked_at = 0.0
        one.tick(bring)

    ask(("198.51.100.2", 1))
    ask(("198.51.100.3", 1))  # another of its addresses
    assert one.endpoint == ("198.51.100.2", 1)
    one.take_news({"candidates": [("198.51.100.4", 1)], "key": one.key.hex(), "router": vars(KEEPS)}, "")
    ask(("198.51.100.4", 1))
    assert one.endpoint == ("198.51.100.4", 1)


# --- the serving machine

PORT_OF_TEST = 28710  # no port that the system gives to others
PUBLIC, ANOTHER = (base64.b64encode(bytes([each]) * 32).decode() for each in (1, 2))


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("keys")
    make(folder, ["127.0.0.1"], ["zurich", "lima", "oslo"])
    make(folder / "others", ["127.0.0.1"], ["zurich"])
    return folder


def served(keys: Path, then: Callable[[Server], Awaitable[Any]], network: str = "10.88.0.0/24") -> Any:
    async def run() -> Any:
        server = Server(keys / "syncer", network, PORT_OF_TEST)
        async with server.serving("127.0.0.1"):
            return await then(server)

    return asyncio.run(run())


async def meet(keys: Path, name: str) -> tuple[dict[str, Any], Streams]:
    """The streams are to be kept: a reader that nobody has ends the connection."""
    tls = context(keys / name, is_server=False)
    reader, writer = await asyncio.open_connection("127.0.0.1", PORT_OF_TEST, ssl=tls)
    writer.write(messages.as_frame({"do": "join"} | proof.sign(keys / name, "key")))
    return await asyncio.wait_for(messages.read_message(reader), 5), (reader, writer)


def test_udp_questions_are_answered_once_and_only_to_nodes_that_are_here(keys: Path) -> None:
    async def ask(server: Server) -> list[bool]:
        welcome, (reader, writer) = await meet(keys, "lima")
        assert (welcome["network"], welcome["number"]) == ("10.88.0.0/24", 2)
        asker = find.Asker(bytes.fromhex(welcome["session"]), bytes.fromhex(welcome["key"]))
        question, _ = asker.question(messages.ASK)
        stranger, _ = find.Asker(asker.session, b"x" * 32).question(messages.ASK)
        short, _ = asker.question(messages.ASK, size=messages.ANSWER)
        found = [await asyncio.to_thread(answered, asker, data) for data in (stranger, short, question, question)]
        writer.close(), reader.feed_eof()
        return found

    def answered(asker: find.Asker, data: bytes) -> bool:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as by:
            by.bind(("127.0.0.1", 0))
            by.sendto(data, ("127.0.0.1", PORT_OF_TEST))
            replies = [find.to_endpoint(reply) == by.getsockname() for reply in asker.replies(by, 0.3)]
            return replies == [True]

    assert served(keys, ask) == [False, False, True, False]


def test_a_stranger_learns_nothing(keys: Path) -> None:
    async def knock(server: Server) -> None:
        _, (reader, writer) = await meet(keys, "lima")
        anyone = ssl.create_default_context()
        anyone.check_hostname, anyone.verify_mode = False, ssl.CERT_NONE
        another = context(keys / "others/zurich", is_server=False)
        another.check_hostname, another.verify_mode = False, ssl.CERT_NONE
        for tls in (anyone, another):
            said = b""
            with contextlib.suppress(OSError):
                hears, asks = await asyncio.open_connection("127.0.0.1", PORT_OF_TEST, ssl=tls)
                asks.write(messages.as_frame({"do": "join"}))
                said = await hears.read()
            assert said == b"" and list(server.nodes) == ["lima"]
        writer.close(), reader.feed_eof()

    served(keys, knock)


@pytest.mark.parametrize("body", [b"[1]", b"{", b"\0" * (messages.LARGEST + 1), json.dumps({"do": "carry"}).encode()])
def test_a_message_that_is_none_ends_the_connection_without_a_word(keys: Path, body: bytes) -> None:
    async def send(server: Server) -> bytes:
        tls = context(keys / "lima", is_server=False)
        reader, writer = await asyncio.open_connection("127.0.0.1", PORT_OF_TEST, ssl=tls)
        with contextlib.suppress(OSError):
            writer.write(messages.frame(body))
            return await asyncio.wait_for(reader.read(), 5)
        return b""

    assert served(keys, send) == b""


def test_the_serving_machine_refuses_by_name(keys: Path, tmp_path: Path) -> None:
    shutil.copytree(keys, tmp_path / "keys")
    own = tmp_path / "keys"
    revoke(own, "oslo")
    (own / "syncer/sites.json").write_text(json.dumps(["lima", "oslo"]))

    async def refusals(server: Server) -> list[str]:
        return [(await meet(own, name))[0]["why"] for name in ("oslo", "zurich")]

    revoked, unknown = served(own, refusals)
    assert revoked == "the certificate of oslo is revoked" and "zurich is not in sites.json" in unknown

    async def too_many(server: Server) -> str:
        return str((await meet(keys, "oslo"))[0]["why"])

    assert "10.88.0.0/30 has no address for node 3; give a larger one" in served(keys, too_many, "10.88.0.0/30")
    with (
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as taken,
        pytest.raises(Refusal, match="cannot be used: .*--port"),
    ):
        taken.bind(("0.0.0.0", PORT_OF_TEST))
        served(keys, too_many)
    with pytest.raises(Refusal, match="--through rome is no site of .*; use one of zurich, lima, oslo"):
        parser = argparse.ArgumentParser()
        serve.add_arguments(parser)
        serve.run(parser.parse_args(["--keys", str(keys), "--through", "rome"]), [])


def test_a_node_that_is_revoked_is_put_out_and_the_others_hear_of_it_also_after_it_hung_up(
    keys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = shutil.copytree(keys, tmp_path / "keys")
    monkeypatch.setattr(server, "_REVOKED_SECONDS", 0.1)

    async def put_out(served: Server) -> list[dict[str, Any]]:
        _, lima = await meet(own, "lima")
        _, zurich = await meet(own, "zurich")
        zurich[1].close()
        _, oslo = await meet(own, "oslo")
        revoke(own, "zurich"), revoke(own, "oslo")
        said = [await asyncio.wait_for(messages.read_message(each), 5) for each in (oslo[0], lima[0])]
        assert list(served.nodes) == ["lima"] and zurich
        for broken in ("{half", "[1]"):
            (own / "syncer/revoked.json").write_text(broken)
            assert server.revoked(own / "syncer", {"1a": "zurich"}) == {"1a": "zurich"}
        lima[1].write(messages.as_frame({"do": "here", "candidates": [], "router": vars(KEEPS)}))
        return [*said, await asyncio.wait_for(messages.read_message(lima[0]), 5)]

    refused, *told = served(own, put_out)
    assert refused == {"do": "refuse", "why": "the certificate of oslo is revoked"}
    serials = [proof.check(own / "lima", name, proof.sign(own / name, PUBLIC))[1] for name in ("zurich", "oslo")]
    assert told == [{"do": "revoked", "serials": serials}] * 2


@pytest.mark.parametrize(
    "message",
    [
        {"do": "here", "candidates": [["198.51.100.1", 70000]], "router": vars(KEEPS)},
        {"do": "here", "candidates": [["198.51.100.1", 1]], "router": vars(KEEPS) | {"count": float("inf")}},
        {"do": "relay", "peer": "lima"},
        {"do": "here", "candidates": [["fe80::1%eth0", 1]], "router": vars(KEEPS)},
    ],
)
def test_what_no_honest_node_says_ends_its_connection_and_reaches_nobody(keys: Path, message: dict[str, Any]) -> None:
    async def say(served: Server) -> None:
        _, zurich = await meet(keys, "zurich")
        _, (reader, writer) = await meet(keys, "lima")
        writer.write(messages.as_frame(message))
        assert await asyncio.wait_for(reader.read(), 5) == b"" and list(served.nodes) == ["zurich"] and zurich

    served(keys, say)


def test_a_node_has_few_connections_and_one_that_carries(keys: Path) -> None:
    async def knock(served: Server) -> None:
        welcome, (reader, writer) = await meet(keys, "lima")
        tls, carriers = context(keys / "lima", is_server=False), []
        for _ in range(server._MOST_CONNECTIONS):
            carriers.append(await asyncio.open_connection("127.0.0.1", PORT_OF_TEST, ssl=tls))
            carriers[-1][1].write(messages.as_frame({"do": "carry"}))
            with contextlib.suppress(EOFError):
                await asyncio.wait_for(messages.read_message(carriers[-1][0]), 5)
        assert await asyncio.wait_for(carriers[0][0].read(), 5) == b""  # the second took its place
        assert not reader.at_eof() and welcome and writer

    served(keys, knock)


def test_a_pair_that_is_direct_is_relayed_no_more_and_both_of_a_pair_may_ask_at_once(keys: Path) -> None:
    async def pair(served: Server) -> None:
        (_, (reads, one)), (_, (_, other)) = await meet(keys, "zurich"), await meet(keys, "lima")
        relay = served.relays.of(1, 2)
        ports = await asyncio.gather(*(served.relays.open(relay, ["127.0.0.1"]) for _ in range(2)))
        assert ports[0] == ports[1] == PORT_OF_TEST + 2
        socket, got = relay.sockets["127.0.0.1"], []
        for number in (1, 2):
            relay.bind(number, socket, ("127.0.0.1", number))
            relay.legs[number] = got.append
        relay.take(1, b"relayed")
        for writer, name in ((one, "lima"), (other, "zurich")):
            assert relay.legs
            writer.write(messages.as_frame({"do": "way", "peer": name, "way": "direct"}))
            writer.write(messages.as_frame({"do": "beat"}))
        assert await asyncio.wait_for(messages.read_message(reads), 5) == {"do": "beat"}
        while relay.legs:
            await asyncio.sleep(0.01)
        relay.take(1, b"late")
        assert got == [b"relayed"] and not relay.senders

    served(keys, pair)


def test_a_key_that_its_owner_did_not_sign_is_not_taken(keys: Path) -> None:
    said = proof.sign(keys / "lima", PUBLIC)
    assert proof.check(keys / "zurich", "lima", said)[0] == PUBLIC
    for name, wrong in (
        ("lima", said | {"public": "another"}),
        ("oslo", said),
        ("lima", {"public": "public"}),
        ("zurich", proof.sign(keys / "others/zurich", PUBLIC)),
        ("syncer", proof.sign(keys / "syncer", PUBLIC)),  # a serving machine that was broken into
        ("lima", proof.sign(keys / "lima", "x")),
        ("lima", proof.sign(keys / "lima", PUBLIC[:-2] + "F=")),  # the same bytes, written as `wg` does not take them
    ):
        with pytest.raises(Refusal, match=f"{name!r} shows a key that is not signed by its certificate"):
            proof.check(keys / "oslo", name, wrong)


# --- a node

needs_wg = pytest.mark.skipif(shutil.which("wg") is None, reason="wg is not here; apt install wireguard-tools")


@needs_wg
def test_a_node_says_why_it_cannot_join(keys: Path, tmp_path: Path) -> None:
    def node() -> Node:
        return Node(keys / "lima", "127.0.0.1", PORT_OF_TEST, "reach-none", 51999, tmp_path)

    with pytest.raises(Refusal, match=f"127.0.0.1 port {PORT_OF_TEST} serves no node .*is `reach serve` running there"):
        asyncio.run(node().run())
    shutil.copytree(keys, tmp_path / "keys")
    revoke(tmp_path / "keys", "lima")

    async def refused(server: Server) -> None:
        with pytest.raises(Refusal, match=r"127.0.0.1 refuses this node: the certificate of lima is revoked"):
            await node().run()

    served(tmp_path / "keys", refused)


def test_the_verbs_refuse_before_they_change_anything(
    keys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parser = argparse.ArgumentParser()
    join.add_arguments(parser)
    args = parser.parse_args(["meet.example.org", "--keys", str(keys), "--interface", "reach-none"])
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(Refusal, match="only root can; start it with sudo"):
        join.run(args, [])
    with pytest.raises(Refusal, match="no network of reach is up at reach-none"):
        leave.run(args, [])
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(leave, "_FOLDER", tmp_path)
    monkeypatch.setattr(wireguard, "require_programs", lambda: None)
    leave.state_file("reach-none").write_text(json.dumps({"pid": os.getppid()}))
    if b"reach" in Path(f"/proc/{os.getppid()}/cmdline").read_bytes():
        with pytest.raises(Refusal, match=f"process {os.getppid()} keeps reach-none up; `reach leave` ends it"):
            join.run(args, [])
    monkeypatch.undo()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Refusal, match="ip, wg is not on this machine; apt install iproute2 wireguard-tools"):
        wireguard.require_programs()


@needs_wg
def test_a_node_takes_no_address_or_key_of_another_and_no_network_that_it_uses(
    keys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    node, given = Node(keys / "zurich", "meet", PORT_OF_TEST, "reach-none", 51999, tmp_path), []
    monkeypatch.setattr(node.interface, "set_peer", lambda *peer: given.append(peer[:3]))
    routes = [{"dst": "default", "dev": "eth0"}, {"dst": "192.168.0.0/20", "dev": "eth0"}]
    routes.append({"dst": "10.88.0.0/24", "dev": "reach-none"})
    monkeypatch.setattr(wireguard, "_run", lambda words, text=None: json.dumps(routes))
    used, public = "has addresses of 192.168.0.0/20, which is here", "is not a private one"
    for network, why in (("192.168.1.0/24", used), ("8.8.8.0/24", public), ("169.254.169.0/24", public)):
        with pytest.raises(Refusal, match=f"the network {network} of meet {why}.*--network"):
            wireguard.address_in(network, 1, "meet", "reach-none")
    assert wireguard.address_in("10.88.0.0/24", 1, "meet", "reach-none")[1] == "10.88.0.1"
    node.number = 1

    def hear(name: str, number: int, public: str) -> None:
        about = {"key": "00" * 32, "candidates": [["198.51.100.2", 1]], "router": vars(KEEPS)}
        node._obey({"do": "peer", "name": name, "number": number, "proof": proof.sign(keys / name, public)} | about)

    hear("lima", 2, PUBLIC)
    for number, public in ((3, PUBLIC), (3, node.public), (2, ANOTHER), (1, ANOTHER)):
        hear("oslo", number, public)
    assert [*node.peers] == ["lima"] and given == [(PUBLIC, ["10.88.0.2"], None)]
    assert capsys.readouterr().out.count("of another node; do not trust") == 4
    hear("oslo", 3, ANOTHER)
    node.peers["lima"].way, node.peers["lima"].used = "through", "oslo"
    for peer in node.peers.values():  # in any order, what is behind oslo stays there
        node._set(peer)
    assert given[-2:] == [(ANOTHER, ["10.88.0.3", "10.88.0.2"], None)] * 2
    monkeypatch.setattr(node.interface, "remove_peer", given.append)
    node._obey({"do": "revoked", "serials": [node.peers["lima"].serial]})
    assert [*node.peers] == ["oslo"] and given[-1] == PUBLIC


@needs_wg
def test_addresses_of_other_tunnels_are_neither_offered_nor_written_to(
    keys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two tunnels that carry each other's packets stand still. One that carries all this machine sends may be used."""
    found = {"127.0.0.1": "lo", "192.168.1.2": "eth0", "10.88.0.1": "reach0", "100.64.0.9": "tailscale0"}
    for module in (port, node_module):
        monkeypatch.setattr(module, "own_addresses", lambda: found)
    monkeypatch.setattr(port, "is_tunnel", lambda interface: interface in ("reach0", "tailscale0"))
    monkeypatch.setattr(port, "address_toward", lambda to: ways.get(to, "192.168.1.2"))
    sent: list[Any] = []
    ways = {"10.99.0.1": "100.64.0.9", "10.99.0.9": "100.64.0.9"}
    for meet, offered, written in (("198.51.100.10", 1, 1), ("10.99.0.9", 2, 2)):
        node, udp = Node(keys / "zurich", "meet", PORT_OF_TEST, "reach0", 51999, tmp_path), object.__new__(port.Port)
        udp.number, udp._server = 51999, meet
        udp._raw = {socket.AF_INET: argparse.Namespace(sendto=lambda _, to: sent.append(to))}
        node._udp, node.router = udp, KEEPS
        node._say_where()
        addresses = [address for address, _ in node._said["candidates"]]
        assert addresses == ["192.168.1.2", "100.64.0.9"][:offered]
        for to in ("10.99.0.1", "198.51.100.1"):
            udp.send(b"", (to, 7))
        assert len(sent) == written
        sent.clear()


def test_a_peer_greets_with_its_first_endpoint_and_not_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """WireGuard greets once in 5 s, also in vain: a keepalive without an endpoint would cost these seconds."""
    said: list[str] = []
    monkeypatch.setattr(wireguard, "_run", lambda words, text=None: said.append(" ".join(words[3:])))
    interface = wireguard.Interface("reach0")
    for endpoint in (None, "198.51.100.1:7", "198.51.100.1:8"):
        interface.set_peer("KEY", ["10.88.0.2"], endpoint, 25)
    alive = "peer KEY allowed-ips 10.88.0.2/32 persistent-keepalive 25 endpoint 198.51.100.1"
    assert said == ["peer KEY allowed-ips 10.88.0.2/32", f"peer KEY remove {alive}:7", f"{alive}:8"]


@needs_wg
def test_an_interface_that_is_there_stays_as_it_is() -> None:
    interface = wireguard.Interface("lo")
    with pytest.raises(Refusal, match="the interface lo is there already, .*--interface"):
        interface.bring_up("", 51999, "10.88.0.2", 24, 1420)
    assert not interface.is_up


@needs_wg
def test_a_kernel_without_wireguard_needs_wireguard_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ip", "wg"):
        (tmp_path / name).symlink_to(shutil.which(name) or "")
    monkeypatch.setenv("PATH", str(tmp_path))
    private, public = wireguard.new_keys()
    assert len(private) == len(public) == 44 and private != public
    with pytest.raises(Refusal, match="this kernel has no WireGuard .*apt install wireguard-go"):
        wireguard.Interface("a-name-that-is-too-long").bring_up(private, 51999, "10.88.0.2", 24, 1420)
    with pytest.raises(Refusal, match="wg set reach-none peer .*see that no other interface is in the way"):
        wireguard.Interface("reach-none").set_peer(public, ["10.88.0.3"], None, 25)


def test_files_name_no_node_that_is_not_here(tmp_path: Path) -> None:
    facts = {"kind": "H100", "gpus": 8, "memory_gib": 80, "tflops": 989}
    found = {
        "names": ["zurich", "lima"],
        "facts": [facts, facts],
        "delay_ms": [[0, 9], [9, 0]],
        "gbit": [[0, 1], [1, 0]],
    }
    addresses = {"zurich": "10.88.0.1", "lima": "10.88.0.2"}
    files = measure.write_files(tmp_path, found, addresses, ["zurich - lima: direct"])
    assert "gpus = 8" in files[1].read_text() and "per_node = 8" in files[0].read_text()
    with pytest.raises(ValueError, match="rome"):
        measure.write_files(tmp_path, found | {"names": ["zurich", "rome"]}, addresses, [])
    assert Inside("zurich", "10.88.0.1", {"lima": peer(1, 2, [])}, tmp_path).addresses() == {
        "zurich": "10.88.0.1",
        "node-2": "10.88.0.2",
    }
    assert measure.facts()["memory_gib"] > 0


def test_a_result_that_cannot_be_written_leaves_the_network_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "taken").write_text("no folder")
    found = {"names": ["zurich"], "facts": [measure.facts()], "delay_ms": [[0]], "gbit": [[0]]}
    inside = Inside("zurich", "10.88.0.1", {"lima": peer(1, 2, [])}, tmp_path / "taken")
    inside.peers["lima"].is_silent = True  # it was killed: the others are measured without it
    inside._write(found, "10.88.0.1")
    assert "taken could not be written: File exists; the network stays up" in capsys.readouterr().out
    inside._write(found, "10.88.0.2")
    assert "10.88.0.2 sent it, and 10.88.0.1 leads" in capsys.readouterr().out
