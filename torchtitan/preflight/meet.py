"""Checks before training that the nodes of a run reach each other and are alike; all end with the same verdict.

    PREFLIGHT=1 ./run_llama_train.sh            on each node; trains if all is well
    python -m torchtitan preflight              on each node, with the same variables; only checks

Every node, 0 too, connects to the head as its ranks will, says its facts, and does what node 0 (lead.py) asks until it
hears the verdict.
"""

import contextlib
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchtitan.config.schema import Config
from torchtitan.preflight import network
from torchtitan.preflight.facts import Facts, gather
from torchtitan.preflight.lead import ANSWER_SECONDS, Failed, Lead
from torchtitan.preflight.network import Channel, split_endpoint, what_failed
from torchtitan.preflight.report import print_report
from torchtitan.refusal import Refusal

if TYPE_CHECKING:  # it imports this file
    from torchtitan.launch.node import Node

_WELCOME_SECONDS = 20  # for node 0 to say that it is one; the program at a wrong port may say nothing
_PAIR_SECONDS = 6
_STOPS = ": large packets are lost (compare the MTU of both ends and of the switch), or the other end has ended"
_FOLDER_SECONDS = 5  # until a file of another node must be seen


def run(node: "Node", config: Config, env: Mapping[str, str], gpus: int) -> bool:
    """Whether training may begin; says so, or why not."""
    begin = time.monotonic()
    if node.num_nodes > 1 and node.rank is None:
        raise Refusal("PET_RDZV_ENDPOINT leaves the ranks of nodes to torchrun; a preflight needs NODE_RANK on each")
    toward = network.address_toward(split_endpoint(node.head)[0]) if node.num_nodes > 1 else None
    told = {"NNODES": str(node.num_nodes), "NGPU": str(node.num_processes), "run": node.run_id}
    facts = gather(told, config, env, toward, gpus)
    lead, errors = None, []
    try:
        if node.rank == 0 or node.num_nodes == 1:
            lead = Lead(node, config, begin)
            lead.start()
        errors = take_part(node, facts, begin, lead)
    except Failed as failure:
        errors = list(failure.args)
    finally:
        if lead is not None:
            lead.given_up.set()
            lead.join()
    if lead is not None and lead.report.nodes:
        print_report(asdict(lead.report))
    for error in errors:
        print(f"run_llama_train.sh: preflight: {error}", file=sys.stderr)
    seconds = time.monotonic() - begin
    print(f"preflight {'failed' if errors else 'passed'} in {seconds:.1f} s", file=sys.stderr, flush=True)
    return not errors


def take_part(node: "Node", facts: Facts, begin: float, lead: "Lead | None") -> list[str]:
    """Do what node 0 asks; the errors of its verdict."""
    me = f"node {node.rank or 0} ({facts['host']})"
    head = lead.endpoint if lead else node.head
    try:  # node 0's listener is up already: a head that does not answer is not node 0
        connection = network.connect(head, begin + node.timeout_seconds if lead is None else time.monotonic() + 5)
    except OSError as error:
        raise Failed(_unreachable(me, node, facts, error)) from None
    channel = Channel(connection, _WELCOME_SECONDS)
    peers = network.listen(0, facts["address"])
    try:
        channel.send(preflight=node.rank or 0, port=peers.getsockname()[1], facts=facts)
        while (order := channel.receive())["do"] != "verdict":
            if order["do"] == "wait":
                connection.settimeout(node.timeout_seconds + ANSWER_SECONDS)
                continue
            channel.send(**_obey(order, peers, node.rank or 0))
        return list(order["errors"])
    except OSError as error:
        raise Failed(
            f"{me}: what answers at the head, {head}, breaks off ({error}): it is no preflight, or has ended; look at "
            f"node 0's output, and whether it was started with PREFLIGHT=1, too"
        ) from None
    finally:
        peers.close()
        channel.close()


def _unreachable(me: str, node: "Node", facts: Facts, error: OSError) -> str:
    host, _ = split_endpoint(node.head)
    own = network.in_words(facts["addresses"])
    if node.rank == 0:
        return f"{node.head} does not lead to node 0 itself ({what_failed(error)}); MASTER_ADDR must be one of {own}"
    if network.leads_here(host, facts["addresses"]):
        return f"MASTER_ADDR = {host} is {me} itself; use an address of node 0 that all nodes reach"
    return (
        f"{me} cannot reach the head {node.head} within {node.timeout_seconds} s: {what_failed(error)}. It has {own}; "
        f"MASTER_ADDR must be one of node 0's, MASTER_PORT the same on all nodes, and node 0 must have been started"
    )


def _obey(order: dict[str, Any], peers: socket.socket, rank: int) -> dict[str, Any]:
    if order["do"] == "clock":
        return {"time": time.time()}
    if order["do"] == "folder":
        return {"error": _look_and_leave(Path(order["path"]), order["token"], rank)}
    return _measure(order, peers)


def _look_and_leave(path: Path, token: str, rank: int) -> str | None:
    """Whether the file that node 0 wrote is seen here, and another can be written beside it."""
    end = time.monotonic() + _FOLDER_SECONDS
    try:
        while not path.is_file() or path.read_text() != token:
            if time.monotonic() > end:
                return "does not see what node 0 writes there"
            time.sleep(0.2)
    except OSError as error:
        return f"cannot read there ({error.strerror})"
    try:
        path.with_suffix(f".{rank}").write_text(token)
    except OSError as error:
        return f"cannot write there ({error.strerror})"
    return None


def _measure(order: dict[str, Any], peers: socket.socket) -> dict[str, Any]:
    """One end of a pair: the end that is given the other's address connects, measures and reports."""
    token = order["token"].encode()
    end = time.monotonic() + _PAIR_SECONDS
    try:
        if order["to"]:
            address, port = order["to"]
            with socket.create_connection((address, port), timeout=_PAIR_SECONDS - 1) as connection:
                try:
                    connection.sendall(token)
                    seconds, there, back = network.measure_with(connection, leads=True)
                except OSError as error:
                    return {"error": f"they connect, but what is sent stops ({error}){_STOPS}"}
            return {"round_trip_ms": seconds * 1e3, "gbit_there": there * 8e-9, "gbit_back": back * 8e-9}
        while True:  # whoever else knocks is sent away
            peers.settimeout(max(0.01, end - time.monotonic()))
            (connection, _), came = peers.accept(), b""
            with connection:
                connection.settimeout(_PAIR_SECONDS)
                with contextlib.suppress(OSError):
                    came = network.receive_exactly(connection, len(token))
                if came == token:
                    network.measure_with(connection, leads=False)
                    return {}
    except OSError as error:
        return {"error": what_failed(error)}
