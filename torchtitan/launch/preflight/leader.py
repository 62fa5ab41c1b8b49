"""Node 0's part of a preflight: wait for all nodes, compare their facts, have them test things, send the verdict.

Node 0 listens where torchrun will, so the preflight also tests the head's address and port. Bandwidth is that of one
TCP stream: it finds a slow link, but NCCL gets more out of InfiniBand.
"""

import contextlib
import errno
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
from typing import Any

from torchtitan import hardware
from torchtitan.config.schema import Config
from torchtitan.launch.addresses import interface_of, own_addresses, split_endpoint
from torchtitan.launch.node import Node
from torchtitan.launch.preflight.arrivals import Arrivals
from torchtitan.launch.preflight.compare import differences, gpu_notes, in_short, name_of
from torchtitan.launch.preflight.connection import Channel, listen
from torchtitan.launch.preflight.facts import Facts, digest
from torchtitan.launch.preflight.heat_map import draw
from torchtitan.launch.preflight.report import slow_pairs

_CLOCK_SECONDS = 5  # torchrun (c10d) sends heartbeats every 5 s, and takes a node for dead when the last looks 15 s old
_MOST_ROUNDS = 31  # of pairs that measure at once: covers all pairs of 32 nodes, and some pairs of more nodes
_SAY_SECONDS = 10  # silence before node 0 prints which nodes it waits for


class Failed(Exception):
    """Ends the preflight; its arguments are the messages."""


@dataclass
class Report:
    """Everything that node 0 found; written to preflight.json."""

    errors: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    nodes: list[Facts] = field(default_factory=list)
    pairs: list[dict[str, Any]] = field(default_factory=list)
    rounds: str = ""
    seconds: float = 0.0


class Leader(threading.Thread):
    """A thread on node 0, which also takes part as a member in its main thread."""

    def __init__(self, node: Node, config: Config, begin: float, secret: str) -> None:
        super().__init__(daemon=True)
        self.node, self.config, self.begin = node, config, begin
        self.report, self.member_ended = Report(), threading.Event()
        self.channels: dict[int, Channel] = {}
        self.members: dict[int, dict[str, Any]] = {}
        host, port = split_endpoint(node.head) if node.head else (hardware.loopback(), 0)
        try:  # a host name may mean one address here and another elsewhere
            listener = listen(port, host if host in own_addresses() else "")
        except OSError as error:
            taken = error.errno == errno.EADDRINUSE
            why = "another program uses it" if taken else os.strerror(error.errno or 0).lower()
            raise Failed(
                f"MASTER_PORT = {port} is a port on which node 0 cannot listen: {why}; set another port on all nodes"
            ) from None
        self.endpoint = node.head or f"[{host}]:{listener.getsockname()[1]}"
        self.arrivals = Arrivals(listener, secret)

    def run(self) -> None:
        report = self.report
        try:
            self._wait_for_all()
            report.nodes = [self.members[rank]["facts"] for rank in range(self.node.num_nodes)]
            report.errors += differences(report.nodes) + self._check_clocks() + self._check_folder()
            report.warnings += self._interfaces() + gpu_notes(report.nodes)
            if not report.errors:
                report.errors += self._measure_pairs()
            report.warnings += slow_pairs(asdict(report))
        except Failed as failure:
            report.errors += failure.args
            self._admit_late_nodes()
        except Exception as error:  # a bug here, or a node with other code; it must not look like a pass
            report.nodes = []
            report.errors.append(f"the preflight itself failed on node 0: {error!r}; give all nodes the same code")
        finally:
            self.arrivals.end()
            report.seconds = time.monotonic() - self.begin
            self._write()
            for channel in self.channels.values():
                with contextlib.suppress(OSError):
                    channel.send(do="verdict", errors=report.errors)
                    channel.connection.shutdown(socket.SHUT_WR)  # close() could drop a verdict not yet read

    def _write(self) -> None:
        folder = Path(self.config.job.dump_folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            nodes = [
                facts | {"code": digest(facts["code"]), "config": digest(facts["config"])}
                for facts in self.report.nodes
            ]
            text = json.dumps(asdict(self.report) | {"nodes": nodes}, indent=1)
            (folder / "preflight.json").write_text(text, encoding="utf-8")
            if self.report.pairs:
                (folder / "preflight.svg").write_text(draw(asdict(self.report)), encoding="utf-8")
        except OSError as error:
            self.report.errors.append(
                f"job.dump_folder = {str(folder)!r} cannot be written on node 0: {error.strerror}; use another folder"
            )

    def _wait_for_all(self) -> None:
        announced, end = False, self.begin + self.node.timeout_seconds
        while missing := [rank for rank in range(self.node.num_nodes) if rank not in self.members]:
            if came := self.arrivals.next(0.2):
                self._welcome(*came)
                continue
            left = end - time.monotonic()
            if self.member_ended.is_set():
                raise Failed(f"node 0 cannot reach its own address {self.node.head}; see its output")
            if left < 0:
                others = self.arrivals.about_strangers()
                raise Failed(
                    f"{in_short(missing)} of {self.node.num_nodes} did not connect to {self.node.head} within "
                    f"{self.node.timeout_seconds} s (RDZV_TIMEOUT); see the output there{others}"
                )
            if not announced and time.monotonic() - self.begin > _SAY_SECONDS:
                announced = True
                waits = f"preflight: waiting {left:.0f} s more for {in_short(missing)}{self.arrivals.about_strangers()}"
                print(waits, file=sys.stderr, flush=True)

    def _welcome(self, channel: Channel, hello: dict[str, Any], address: str) -> None:
        rank, host = hello["preflight"], hello["facts"]["host"]
        if rank in self.members and _hung_up(self.channels[rank].connection):
            self.channels.pop(rank).close()  # this node was restarted
            del self.members[rank]
        if rank in self.members or not 0 <= rank < self.node.num_nodes:
            self.channels[-1 - len(self.channels)] = channel  # it hears the verdict, too
            this = f"{host} ({address})"
            if rank not in self.members:
                of = hello["facts"]["launch"]["NNODES"]
                raise Failed(
                    f"{this} has NODE_RANK = {rank} and NNODES = {of}, but node 0 has NNODES = {self.node.num_nodes}; "
                    f"set the same NNODES on all nodes"
                )
            other = f"{self.members[rank]['facts']['host']} ({self.members[rank]['from']})"
            raise Failed(f"{other} and {this} both have NODE_RANK = {rank}; give each node its own")
        self.channels[rank], self.members[rank] = channel, hello | {"from": address}
        channel.send(do="wait")  # tells the node that it has reached node 0

    def _admit_late_nodes(self) -> None:
        """Wait one more second for nodes that must hear the verdict, too; node 0's own member may be one of them."""
        end = time.monotonic() + 1
        while len(self.members) < self.node.num_nodes and (left := end - time.monotonic()) > 0:
            if came := self.arrivals.next(left):
                self.channels[-1 - len(self.channels)] = came[0]

    def _ask(self, orders: Mapping[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
        """Send each node its order, then gather all answers."""
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
                        f"{name_of(self.report.nodes, rank)} connected, then dropped out ({error}); see its output"
                    ) from None
        return answers

    def _check_clocks(self) -> list[str]:
        wrong = []
        for rank, facts in enumerate(self.report.nodes):
            best = float("inf")
            for _ in range(5):  # the quickest exchange gives the best estimate, as in NTP
                before, begin = time.time(), time.perf_counter()
                there = self._ask({rank: {"do": "clock"}})[rank]["time"]
                took = time.perf_counter() - begin
                if took < best:
                    best, facts["clock_seconds"] = took, there - before - took / 2
            if abs(off := facts["clock_seconds"]) > _CLOCK_SECONDS:
                name = name_of(self.report.nodes, rank)
                wrong.append(
                    f"{name}: its clock is {off:+.1f} s from node 0's, more than {_CLOCK_SECONDS} s; set both by NTP"
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
            return [f"checkpoints go to {folder}, which node 0 cannot write: {error.strerror}; set --job.dump_folder"]
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
        wrong = dict.fromkeys(unseen, "wrote a file there that node 0 does not see") | wrong
        fix = "set job.dump_folder to a folder that all nodes share, or use --checkpoint.no_enable"
        return [
            f"checkpoints go to {folder}, but {name_of(self.report.nodes, rank)} {what}; {fix}"
            for rank, what in wrong.items()
        ]

    def _interfaces(self) -> list[str]:
        """Notes on nodes where gloo would use another interface than the route to the head."""
        used: dict[tuple[str, str], list[int]] = {}
        for rank, facts in enumerate(self.report.nodes):
            here, there = (interface_of(facts[key], facts["addresses"]) for key in ("address", "toward_head"))
            if here != there and there not in ("lo", "?"):
                used.setdefault((here, there), []).append(rank)
        return [
            f"gloo uses {here} on {in_short(ranks)}, but the route to the head is {there}; to use {there}, set "
            f"GLOO_SOCKET_IFNAME={there} NCCL_SOCKET_IFNAME={there} on these nodes"
            for (here, there), ranks in used.items()
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
                orders[high] = order | {"to": [nodes[low]["address"], self.members[low]["port"]]}
            answers = self._ask(orders)
            failed = [(low, high, answers[high]["error"]) for low, high in pairs if "error" in answers[high]]
            if failed:
                low, high, why = failed[0]
                more = f" ({len(failed)} of {len(pairs)} pairs in this round failed)" if len(failed) > 1 else ""
                fix = [*self._interfaces(), "open all ports between the nodes, not only the head's"][0]
                report.warnings = [warning for warning in report.warnings if warning != fix]
                address = nodes[low]["address"]
                where = f"{address} ({interface_of(address, nodes[low]['addresses'])})"
                return [f"{name_of(nodes, high)} cannot reach {name_of(nodes, low)} at {where}: {why}{more}; {fix}"]
            report.pairs += [{"from": high, "to": low, **answers[high]} for low, high in pairs]
        return []


def plan_rounds(count: int) -> list[list[tuple[int, int]]]:
    """Every pair once, in rounds in which each node is in at most one pair: a round-robin tournament."""
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
        connection.setblocking(True)
