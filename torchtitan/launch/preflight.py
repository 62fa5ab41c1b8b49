"""Checks before training that the nodes of a run reach each other and are alike; each ends with the same verdict.

    PREFLIGHT=1 ./run_llama_train.sh            on each node; trains if all is well
    python -m torchtitan preflight              on each node; with the same variables, and nothing after it

Node 0 leads, listening where torchrun will; every node, 0 too, connects to the head as its ranks will, says its facts
and does what it is asked until it hears the verdict. Bandwidth is of one TCP stream, which says nothing of InfiniBand.
"""

import contextlib
import json
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchtitan.config.schema import Config
from torchtitan.launch import network
from torchtitan.launch.facts import CLOCK_SECONDS, Facts, differences, gather, name_of, slow_gpus
from torchtitan.launch.network import Channel, connect, listen, split_endpoint, what_failed
from torchtitan.launch.report import print_report, slow_pairs

if TYPE_CHECKING:  # it imports this file
    from torchtitan.launch.node import Node

_ANSWER_SECONDS = 30  # of a node that has come
_PAIR_SECONDS = 6
_FOLDER_SECONDS = 5  # until a file of another node must be seen: network folders remember what was not there
_MOST_ROUNDS = 31  # of pairs that measure at once; up to 32 nodes that is every pair


class Failed(Exception):
    """One message or several that end the preflight."""


@dataclass
class Report:
    """All that node 0 has found; preflight.json."""

    errors: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    nodes: list[Facts] = field(default_factory=list)
    pairs: list[dict[str, Any]] = field(default_factory=list)
    rounds: str = ""
    seconds: float = 0.0


def run(node: "Node", config: Config, env: Mapping[str, str], gpus: int) -> bool:
    """Whether training may begin; says so, or why not."""
    begin = time.monotonic()
    if node.num_nodes > 1 and node.rank is None:
        raise ValueError("PET_RDZV_ENDPOINT leaves the ranks of nodes to torchrun; a preflight needs NODE_RANK on each")
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
    try:  # node 0 listens to itself already: a head that does not answer it is none
        listening = connect(head, begin + node.timeout_seconds if lead is None else time.monotonic() + 3)
    except OSError as error:
        raise Failed(_unreachable(me, node, facts, error, time.monotonic() - begin)) from None
    channel = Channel(listening, node.timeout_seconds + _ANSWER_SECONDS)
    peers = listen(0, facts["address"])
    try:
        channel.send(preflight=node.rank or 0, port=peers.getsockname()[1], facts=facts)
        while True:
            order = channel.receive()
            if order["do"] == "verdict":
                return list(order["errors"])
            channel.send(**_obey(order, peers, node.rank or 0))
    except OSError as error:
        raise Failed(
            f"{me}: what answers at the head, {head}, breaks off ({error}): it is no preflight, or has ended; look at "
            f"node 0's output, and whether it was started with PREFLIGHT=1, too"
        ) from None
    finally:
        peers.close()
        channel.close()


def _unreachable(me: str, node: "Node", facts: Facts, error: OSError, seconds: float) -> str:
    host, _ = split_endpoint(node.head)
    own = network.in_words(facts["addresses"])
    if node.rank == 0:
        return f"{node.head} does not lead to node 0 itself ({what_failed(error)}); MASTER_ADDR must be one of {own}"
    if network.leads_here(host, facts["addresses"]):
        return f"MASTER_ADDR = {host} is {me} itself; use an address of node 0 that all nodes reach"
    return (
        f"{me} cannot reach the head {node.head} within {seconds:.0f} s: {what_failed(error)}. It has {own}; "
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
    while not path.is_file() or path.read_text() != token:
        if time.monotonic() > end:
            return "does not see what node 0 writes there"
        time.sleep(0.2)
    try:
        path.with_suffix(f".{rank}").write_text(token)
    except OSError as error:
        return f"cannot write there ({error.strerror})"
    return None


def _measure(order: dict[str, Any], peers: socket.socket) -> dict[str, Any]:
    """One end of a pair: the one with the other's address connects and is answered for."""
    token = order["token"].encode()
    end = time.monotonic() + _PAIR_SECONDS
    try:
        if order["to"]:
            address, port = order["to"]
            with socket.create_connection((address, port), timeout=_PAIR_SECONDS - 1) as connection:
                connection.sendall(token)
                seconds, there, back = network.measure_with(connection, leads=True)
            return {"round_trip_ms": seconds * 1e3, "gbit_there": there * 8e-9, "gbit_back": back * 8e-9}
        while True:  # whoever else knocks is sent away
            peers.settimeout(max(0.01, end - time.monotonic()))
            connection, _ = peers.accept()
            with connection:
                connection.settimeout(_PAIR_SECONDS)
                if connection.recv(len(token), socket.MSG_WAITALL) == token:
                    network.measure_with(connection, leads=False)
                    return {}
    except OSError as error:
        return {"error": what_failed(error)}


class Lead(threading.Thread):
    """Node 0's part: waits for all, compares, asks, and gives the verdict."""

    def __init__(self, node: "Node", config: Config, begin: float) -> None:
        super().__init__(daemon=True)
        self.node, self.config, self.begin = node, config, begin
        self.report, self.given_up = Report(), threading.Event()
        self.channels: dict[int, Channel] = {}
        self.come: dict[int, dict[str, Any]] = {}
        port = split_endpoint(node.head)[1] if node.head else 0
        try:
            self.listener = listen(port)
        except OSError as error:
            raise Failed(
                f"node 0 cannot listen at port {port} ({os.strerror(error.errno or 0)}): another program has it; "
                f"end that, or set another MASTER_PORT on all nodes"
            ) from None
        self.endpoint = node.head or f"localhost:{self.listener.getsockname()[1]}"

    def run(self) -> None:
        report = self.report
        try:
            with self.listener:
                if not self._wait_for_all():
                    return
            report.nodes = [self.come[rank]["facts"] for rank in range(self.node.num_nodes)]
            report.errors += differences(report.nodes) + self._check_clocks() + self._check_folder()
            report.warnings += self._interfaces() + slow_gpus(report.nodes)
            if not report.errors:
                report.errors += self._measure_pairs()
            report.warnings += slow_pairs(asdict(report))
        except Failed as failure:
            report.errors += failure.args
        report.seconds = time.monotonic() - self.begin
        self._write()
        for channel in self.channels.values():
            with contextlib.suppress(OSError):
                channel.send(do="verdict", errors=report.errors)

    def _write(self) -> None:
        folder = Path(self.config.job.dump_folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "preflight.json").write_text(json.dumps(asdict(self.report), indent=1), encoding="utf-8")
        except OSError as error:
            self.report.errors.append(
                f"job.dump_folder = {str(folder)!r} cannot be written on node 0: {error.strerror}"
            )

    def _wait_for_all(self) -> bool:
        """False: it is of no use, for node 0 does not reach itself, and says so."""
        told, end = False, self.begin + self.node.timeout_seconds
        while missing := [rank for rank in range(self.node.num_nodes) if rank not in self.come]:
            self.listener.settimeout(0.2)
            try:
                self._welcome(*self.listener.accept())
            except TimeoutError:
                left = end - time.monotonic()
                if self.given_up.is_set():
                    return False
                if left < 0:
                    raise Failed(
                        f"{_nodes(missing)} of {self.node.num_nodes} did not come to {self.node.head} within "
                        f"{self.node.timeout_seconds} s (RDZV_TIMEOUT); look at the output there"
                    ) from None
                if not told and time.monotonic() - self.begin > 10:
                    told = True
                    print(f"preflight: waiting {left:.0f} s more for {_nodes(missing)}", file=sys.stderr, flush=True)

        return True

    def _welcome(self, connection: socket.socket, source: Any) -> None:
        channel, address = Channel(connection, 5), source[0].removeprefix("::ffff:")
        try:
            hello = channel.receive()
            rank = hello["preflight"]
            host = hello["facts"]["host"]
        except (OSError, KeyError, TypeError):  # not one of ours
            channel.close()
            return
        connection.settimeout(_ANSWER_SECONDS)
        if rank in self.come and _hung_up(self.channels[rank].connection):
            self.channels.pop(rank).close()  # started again
            del self.come[rank]
        if rank in self.come or not 0 <= rank < self.node.num_nodes:
            self.channels[-1] = channel  # to be told, too
            this = f"{host} ({address})"
            if rank not in self.come:
                of = hello["facts"]["launch"]["NNODES"]
                raise Failed(
                    f"{this} says it is node {rank} of {of}, but node 0 was told of {self.node.num_nodes} nodes; "
                    f"set the same NNODES on all"
                )
            other = f"{self.come[rank]['facts']['host']} ({self.come[rank]['from']})"
            raise Failed(f"{other} and {this} both say they are node {rank}; give each its own NODE_RANK")
        self.channels[rank], self.come[rank] = channel, hello | {"from": address}

    def _ask(self, orders: Mapping[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
        """All at once; their answers."""
        answers = {}
        for act in ("send", "receive"):
            for rank, order in orders.items():
                try:
                    if act == "send":
                        self.channels[rank].send(**order)
                    else:
                        answers[rank] = self.channels[rank].receive()
                except OSError as error:
                    raise Failed(
                        f"{name_of(self.report.nodes, rank)} came and is gone ({error}); look at its output"
                    ) from None
        return answers

    def _check_clocks(self) -> list[str]:
        wrong = []
        for rank, facts in enumerate(self.report.nodes):
            best = float("inf")
            for _ in range(5):  # the quickest exchange is the surest, as NTP has it
                before, begin = time.time(), time.perf_counter()
                there = self._ask({rank: {"do": "clock"}})[rank]["time"]
                took = time.perf_counter() - begin
                if took < best:
                    best, facts["clock_seconds"] = took, there - before - took / 2
            if abs(off := facts["clock_seconds"]) > CLOCK_SECONDS:
                name = name_of(self.report.nodes, rank)
                wrong.append(
                    f"{name}: its clock is {off:+.1f} s off node 0's, more than {CLOCK_SECONDS}; set both by NTP"
                )
        return wrong

    def _check_folder(self) -> list[str]:
        checkpoint = self.config.checkpoint
        if not checkpoint.enable or "://" in checkpoint.folder or self.node.num_nodes == 1:
            return []
        folder, token = Path(self.config.job.dump_folder) / checkpoint.folder, secrets.token_hex(8)
        probe = folder / f".preflight-{token}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            probe.write_text(token)
        except OSError as error:
            return [f"checkpoints go to {folder}, which node 0 cannot write: {error.strerror}; use --job.dump_folder"]
        order = {"do": "folder", "path": str(probe.absolute()), "token": token}
        try:
            answers = self._ask(dict.fromkeys(self.channels, order))
        finally:
            unseen = []
            for rank in self.channels:
                left = probe.with_suffix(f".{rank}")
                unseen += [] if left.is_file() else [rank]
                left.unlink(missing_ok=True)
            probe.unlink()
        wrong = {rank: answer["error"] for rank, answer in answers.items() if answer["error"]}
        wrong = dict.fromkeys(unseen, "writes there what node 0 does not see") | wrong
        fix = "put job.dump_folder on a folder that all nodes share, or switch checkpoint.enable off"
        return [
            f"checkpoints go to {folder}, but {name_of(self.report.nodes, rank)} {what}; {fix}"
            for rank, what in wrong.items()
        ]

    def _interfaces(self) -> list[str]:
        """Where gloo would not take the way to the head."""
        taken: dict[tuple[str, str], list[int]] = {}
        for rank, facts in enumerate(self.report.nodes):
            here, there = (facts["addresses"].get(facts[key], "lo") for key in ("address", "toward_head"))
            if here != there and there != "lo":
                taken.setdefault((here, there), []).append(rank)
        return [
            f"gloo takes {here} on {_nodes(ranks)}, the way to the head is {there}; for that, set "
            f"GLOO_SOCKET_IFNAME={there} NCCL_SOCKET_IFNAME={there} there"
            for (here, there), ranks in taken.items()
        ]

    def _measure_pairs(self) -> list[str]:
        report, nodes = self.report, self.report.nodes
        rounds = plan_rounds(len(nodes))
        kept = rounds[:: -(-len(rounds) // _MOST_ROUNDS)] if rounds else []
        report.rounds = f"{len(kept)} of {len(rounds)} rounds of pairs"
        for pairs in kept:
            token, orders = secrets.token_hex(8), {}
            for low, high in pairs:
                order: dict[str, Any] = {"do": "measure", "token": token}
                orders[low] = order | {"to": None}
                orders[high] = order | {"to": [nodes[low]["address"], self.come[low]["port"]]}
            answers = self._ask(orders)
            failed = [(low, high, answers[high]["error"]) for low, high in pairs if "error" in answers[high]]
            if failed:
                low, high, why = failed[0]
                more = f" ({len(failed)} of {len(pairs)} pairs tried fail so)" if len(failed) > 1 else ""
                fix = (
                    report.warnings.pop(0)
                    if self._interfaces()
                    else "open all ports between nodes, not the head's alone"
                )
                address = nodes[low]["address"]
                where = f"{address} ({nodes[low]['addresses'].get(address, 'lo')})"
                return [f"{name_of(nodes, high)} cannot reach {name_of(nodes, low)} at {where}: {why}{more}; {fix}"]
            report.pairs += [{"from": high, "to": low, **answers[high]} for low, high in pairs]
        return []


def plan_rounds(count: int) -> list[list[tuple[int, int]]]:
    """Every pair once, in rounds in which no node is in two pairs; the circle of a tournament."""
    ring = list(range(count)) + ([-1] if count % 2 else [])
    rounds = []
    for _ in range(len(ring) - 1):
        half = len(ring) // 2
        pairs = [tuple(sorted(pair)) for pair in zip(ring[:half], reversed(ring[half:]), strict=True)]
        rounds.append([(low, high) for low, high in pairs if low >= 0])
        ring = [ring[0], ring[-1], *ring[1:-1]]
    return rounds


def _hung_up(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return connection.recv(1, socket.MSG_PEEK) == b""
    except OSError as error:
        return not isinstance(error, BlockingIOError)
    finally:
        connection.settimeout(_ANSWER_SECONDS)


def _nodes(ranks: list[int]) -> str:
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"node{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:8]))}{more}"
