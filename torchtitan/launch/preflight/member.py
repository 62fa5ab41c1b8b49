"""Every node's part of a preflight, node 0's included: all nodes end with the same verdict.

A member connects to the head as its ranks will, sends its facts, and does what node 0 (leader.py) asks, until it
receives the verdict.
"""

import contextlib
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torchtitan.config.schema import Config
from torchtitan.launch.addresses import address_toward, in_words, leads_here, split_endpoint
from torchtitan.launch.node import Node
from torchtitan.launch.preflight.arrivals import ANSWER_SECONDS
from torchtitan.launch.preflight.connection import (
    Channel,
    NotANode,
    connect,
    listen,
    measure_with,
    receive_exactly,
    what_failed,
)
from torchtitan.launch.preflight.facts import Facts, gather
from torchtitan.launch.preflight.leader import Failed, Leader
from torchtitan.launch.preflight.report import print_report
from torchtitan.refusal import Refusal

_WELCOME_SECONDS = 20  # until node 0 answers; another program at a wrong port may never answer
_PAIR_SECONDS = 6
_STOPS = ": large packets are lost (compare the MTU of both ends and of the switch), or the other end has ended"
_FOLDER_SECONDS = 5  # until this node must see a file that node 0 wrote


def run(node: Node, config: Config, env: Mapping[str, str], gpus: int) -> bool:
    """Whether training may begin; prints the report and every error."""
    begin = time.monotonic()
    if node.num_nodes > 1 and node.rank is None:
        raise Refusal(
            "PET_RDZV_ENDPOINT lets torchrun number the nodes, but a preflight comes before; set NODE_RANK on each node"
        )
    toward = address_toward(split_endpoint(node.head)[0]) if node.num_nodes > 1 else None
    settings = {"NNODES": str(node.num_nodes), "NGPU": str(node.num_processes), "run": node.run_id}
    facts = gather(settings, config, env, toward, gpus)
    secret = env.get("PREFLIGHT_SECRET") or node.run_id
    leader, errors = None, []
    try:
        if node.rank == 0 or node.num_nodes == 1:
            leader = Leader(node, config, begin, secret)
            leader.start()
        errors = take_part(node, facts, begin, leader, secret)
    except Failed as failure:
        errors = list(failure.args)
    finally:
        if leader is not None:
            leader.member_ended.set()
            leader.join()
    if leader is not None and leader.report.nodes:
        print_report(asdict(leader.report))
    for error in errors:
        print(f"run_llama_train.sh: preflight: {error}", file=sys.stderr)
    seconds = time.monotonic() - begin
    print(f"preflight {'failed' if errors else 'passed'} in {seconds:.1f} s", file=sys.stderr, flush=True)
    return not errors


def take_part(node: Node, facts: Facts, begin: float, leader: Leader | None, secret: str) -> list[str]:
    """Do what node 0 asks until its verdict; returns the errors of the verdict."""
    me = f"node {node.rank or 0} ({facts['host']})"
    head = leader.endpoint if leader else node.head
    try:  # node 0 listens already, so from node 0 itself a few seconds are enough
        connection = connect(head, begin + node.timeout_seconds if leader is None else time.monotonic() + 5)
    except OSError as error:
        raise Failed(_unreachable(me, node, facts, error)) from None
    channel = Channel(connection, _WELCOME_SECONDS)
    peers = listen(0, facts["address"])
    try:
        channel.prove(secret, leads=False)
        channel.send(preflight=node.rank or 0, port=peers.getsockname()[1], facts=facts)
        while (order := channel.receive())["do"] != "verdict":
            if order["do"] == "wait":
                channel.seconds = node.timeout_seconds + ANSWER_SECONDS
                continue
            channel.send(**_obey(order, peers, node.rank or 0))
        return [str(error) for error in order["errors"]]
    except NotANode as error:
        raise Failed(
            f"{me}: the program at {head} is no node of this run: {error}; give all nodes the same PREFLIGHT_SECRET, "
            "or the same run id"
        ) from None
    except OSError as error:
        raise Failed(
            f"{me}: the connection to the head {head} broke off ({error}): the program there is no preflight, or "
            f"has ended; see node 0's output, and start node 0 with PREFLIGHT=1, too"
        ) from None
    finally:
        peers.close()
        channel.close()


def _unreachable(me: str, node: Node, facts: Facts, error: OSError) -> str:
    host, _ = split_endpoint(node.head)
    own = in_words(facts["addresses"])
    if node.rank == 0:
        return f"{node.head} does not lead to node 0 itself ({what_failed(error)}); set MASTER_ADDR to one of {own}"
    if leads_here(host, facts["addresses"]):
        return f"MASTER_ADDR = {host} is {me} itself; use an address of node 0 that all nodes reach"
    return (
        f"{me} cannot reach the head {node.head} within {node.timeout_seconds} s: {what_failed(error)}. This node has "
        f"{own}; set MASTER_ADDR to an address of node 0, MASTER_PORT to the same port on all nodes, and start node 0"
    )


def _obey(order: dict[str, Any], peers: socket.socket, rank: int) -> dict[str, Any]:
    if order["do"] == "clock":
        return {"time": time.time()}
    if order["do"] == "folder":
        return {"error": _look_and_leave(Path(order["path"]), order["token"], rank)}
    return _measure(order, peers)


def _look_and_leave(path: Path, token: str, rank: int) -> str | None:
    """See the file that node 0 wrote, and write another beside it; returns what failed, or None."""
    end = time.monotonic() + _FOLDER_SECONDS
    try:
        while not path.is_file() or path.read_text() != token:
            if time.monotonic() > end:
                return "does not see the file that node 0 wrote there"
            time.sleep(0.2)
    except OSError as error:
        return f"cannot read there ({error.strerror})"
    try:
        path.with_suffix(f".{rank}").write_text(token)
    except OSError as error:
        return f"cannot write there ({error.strerror})"
    return None


def _measure(order: dict[str, Any], peers: socket.socket) -> dict[str, Any]:
    """One end of a pair. The end that gets the other's address connects, measures and reports."""
    token = order["token"].encode()
    end = time.monotonic() + _PAIR_SECONDS
    try:
        if order["to"]:
            address, port = order["to"]
            with socket.create_connection((address, port), timeout=_PAIR_SECONDS - 1) as connection:
                try:
                    connection.sendall(token)
                    seconds, there, back = measure_with(connection, leads=True)
                except OSError as error:
                    return {"error": f"they connect, but then data stops arriving ({error}){_STOPS}"}
            return {"round_trip_ms": seconds * 1e3, "gbit_there": there * 8e-9, "gbit_back": back * 8e-9}
        while True:  # connections without the token are closed
            peers.settimeout(max(0.01, end - time.monotonic()))
            (connection, _), came = peers.accept(), b""
            with connection:
                connection.settimeout(_PAIR_SECONDS)
                with contextlib.suppress(OSError):
                    came = receive_exactly(connection, len(token))
                if came == token:
                    measure_with(connection, leads=False)
                    return {}
    except OSError as error:
        return {"error": what_failed(error)}
