"""`launch ssh`: a run on machines that ssh reaches, from one terminal.

It sends the checkout, brings bare hosts up, starts every node, shows all logs, and ends all together on Ctrl-C or when
a node fails. The nodes go on while a connection is broken, and no line of their logs is lost.
"""

import argparse
import contextlib
import queue
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtitan.config.load import load_config, to_toml
from torchtitan.launch.addresses import is_local
from torchtitan.launch.submit.install import NOT_FOUND, bring_up, program
from torchtitan.node import messages
from torchtitan.node.archives import Packed, pack
from torchtitan.node.hosts import Host, read_hosts
from torchtitan.node.ssh import Broken, Node, printable, ssh_command
from torchtitan.refusal import Refusal
from torchtitan.root import INSIDE, ROOT

_SECONDS_TO_END = 60  # after Ctrl-C: a run may save first
_SECONDS_AFTER_A_FAILURE = 15  # in which the other nodes may say what they saw
_SECONDS_TO_START = 300  # of one node: its code checks the configuration first
_EXIT_SIGNAL = 128


@dataclass
class _Member:
    """A host with its place in the run."""

    host: Host
    rank: int
    node: Node
    folder: str = ""
    log: str = ""
    is_started: bool = False
    row: messages.RunRow | None = None  # how its part ended
    rest: bytes = b""  # of the log, without its newline

    @property
    def name(self) -> str:
        return self.host.host


def run(args: argparse.Namespace, options: Sequence[str]) -> int:
    """The exit code of the run."""
    if INSIDE.is_dir():
        raise Refusal("launch ssh sends a checkout, and an installed package is none; start it from a clone")
    if not args.hosts:
        raise Refusal("no --hosts is given; name a file with one host a line, or a nodes.toml")
    hosts, ssh = read_hosts(Path(args.hosts)), shlex.split(args.ssh)
    checked = load_config(["--job.config_file", args.config, *options])
    # A model beside the file lies in the same place of the checkout there; each node's own code checks all again.
    config = to_toml(checked).replace(f'"{ROOT}/', '"')
    shares = checked.checkpoint.enable and "://" not in checked.checkpoint.folder and len(hosts) > 1
    if args.prints:
        for rank, host in enumerate(hosts):
            print(f"node {rank} of {len(hosts)}: {shlex.join(ssh_command(host.host, [], ssh)[:-1])}")
        return 0
    environment = dict(given.split("=", 1) for given in args.env)
    with tempfile.TemporaryDirectory() as folder:
        packed = pack(ROOT, Path(folder))
        _say(_about(packed))
        launch = _Launch(args, hosts, packed)
        with launch.interrupts():
            try:
                launch.each(launch.connect)
                launch.start(config, environment, shares)
                return launch.watch()
            except KeyboardInterrupt:
                _say("ending what was started")
                return _EXIT_SIGNAL + signal.SIGINT
            finally:  # also where nobody reads the output any more
                launch.is_watching = True
                launch.stop(0)
                launch.each(lambda member: member.node.close())


class _Launch:
    """All nodes of the run, and what they say."""

    def __init__(self, args: argparse.Namespace, hosts: Sequence[Host], packed: Packed) -> None:
        stem = re.sub("[^A-Za-z0-9-]+", "-", Path(args.config).stem)
        self.name = args.name or f"{stem}-{time.strftime('%Y%m%d-%H%M%S')}"
        self._packed, self._home, self._ssh = packed, args.home, shlex.split(args.ssh)
        self._brings_up = not args.program
        self._command = shlex.split(args.program) if args.program else program(args.home, packed.code)
        self.members = [_Member(host, rank, self._node(host)) for rank, host in enumerate(hosts)]
        self._events: queue.Queue[tuple[_Member, bytes, bool]] = queue.Queue(maxsize=1000)
        self._asked: int = 0  # how often a person has asked the run to end
        self.is_watching = False  # from then on a signal does not interrupt, it is counted

    def _node(self, host: Host) -> Node:
        return Node(host.host, ssh_command(host.host, self._command, self._ssh))

    @contextlib.contextmanager
    def interrupts(self) -> Iterator[None]:
        """Inside, Ctrl-C, a closed terminal and a kill end the run; a second one does not wait for a save."""

        def ask(*_: object) -> None:
            self._asked += 1
            if not self.is_watching:
                raise KeyboardInterrupt

        names = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        before = {name: signal.signal(name, ask) for name in names}
        try:
            yield
        finally:
            for name, handler in before.items():
                signal.signal(name, handler)

    def each(self, do: Callable[[_Member], None], of: Sequence[_Member] | None = None) -> None:
        """Do it for all nodes at once; the first refusal, after all have tried. Ctrl-C waits for none of them."""
        members = self.members if of is None else of
        done: queue.Queue[Exception | None] = queue.Queue()

        def one(member: _Member) -> None:
            try:
                do(member)
            except Exception as error:
                done.put(error)
            else:
                done.put(None)

        for member in members:
            threading.Thread(target=one, args=(member,), daemon=True).start()
        if errors := [error for error in [done.get() for _ in members] if error is not None]:
            raise errors[0]

    def connect(self, member: _Member) -> None:
        """Reach a host, bring it up if it has no node program, and send it the checkout."""
        try:
            member.node.connect()
        except Broken as error:
            if not self._brings_up or member.node.exit_code != NOT_FOUND:
                raise Refusal(f"{error}; try: {shlex.join([*self._ssh, member.name])}") from None
            member.node.close()
            _say(f"[{member.name}] has no node program for this checkout: setting it up in {self._home}")
            bring_up(member.name, self._packed, self._home, self._ssh, lambda line: _say(f"[{member.name}] {line}"))
            member.node = self._node(member.host)
            member.node.connect()
        if member.node.put(self._packed.file, self._packed.code):
            _say(f"[{member.name}] has taken the checkout")

    def start(self, config: str, environment: dict[str, str], shares: bool) -> None:
        """Start every node; where they have to share a disk, the head first, to see whether they do."""
        head, *others = self.members
        place: dict[str, Any] = {"nodes": len(self.members), "config": config, "code": self._packed.code}
        if others:
            place |= {"head": _address(head, self._ssh), "port": head.node.ask(messages.Port).port}

        def start(member: _Member) -> None:
            gpus = member.host.gpus
            own = environment | ({"CUDA_VISIBLE_DEVICES": ""} if gpus == 0 else {})
            here = {"rank": member.rank, "ranks_here": None if gpus is None else max(1, gpus), "environment": own}
            member.is_started = True  # also where the answer is lost: it is stopped then
            try:
                answer = member.node.ask(messages.Start, _SECONDS_TO_START, run=self.name, **place, **here)
            except Refusal as error:  # nothing was started; another run of this name is not to be stopped
                member.is_started = isinstance(error, Broken)
                raise
            member.folder, member.log = answer.folder, answer.log
            member.node.follow(self.name, answer.log, lambda _, *heard: self._events.put((member, *heard)))

        self.each(start, [head] if shares else None)
        if shares:
            self.each(lambda member: self._sees_head(member, head), others)
            self.each(start, others)
        for member in self.members:
            _say(f"[{member.name}] node {member.rank} of {len(self.members)}, run folder {printable(member.folder)}")

    def _sees_head(self, member: _Member, head: _Member) -> None:
        with contextlib.suppress(Refusal):
            files = member.node.ask(messages.Files, run=self.name).files
            if any(row.path == head.log for row in files):
                return
        raise Refusal(
            f"checkpoints go to {printable(head.folder)} of {head.name}, which {member.name} does not share; "
            f"use --home on a disk that all hosts share, -- --checkpoint.folder s3://..., or -- --checkpoint.no_enable"
        )

    def watch(self) -> int:
        """Show the logs until every node's part is over. The first failure ends the others."""
        self.is_watching = True
        open_members, answered, failed_at = list(self.members), 0, None
        while open_members:
            if self._asked > answered:
                answered = self._asked
                seconds = 0 if answered > 1 else _SECONDS_TO_END
                _say(f"asking all nodes to end, within {seconds} s" + ("; Ctrl-C again: at once" if seconds else ""))
                threading.Thread(target=self.stop, args=(seconds,), daemon=True).start()
            if failed_at is not None and time.monotonic() > failed_at + _SECONDS_AFTER_A_FAILURE:
                failed_at = float("inf")
                threading.Thread(target=self.stop, args=(0,), daemon=True).start()
            try:
                member, piece, is_end = self._events.get(timeout=0.2)
            except queue.Empty:
                continue
            _show(member, piece, is_end)
            if is_end:
                open_members.remove(member)
                self._take_end(member)
                if member.row is None or member.row.state not in ("ended", "stopped"):
                    failed_at = failed_at or time.monotonic()
        return self._sum_up()

    def _row(self, member: _Member) -> messages.RunRow | None:
        """What the node knows of its part of the run."""
        rows = member.node.ask(messages.Runs).runs
        return next((row for row in rows if row.run == self.name and row.rank == member.rank and row.is_own), None)

    def _take_end(self, member: _Member) -> None:
        for _ in range(3):  # the connection may break at this moment, too
            with contextlib.suppress(Broken):
                row = self._row(member)
                member.row = row if row and row.state != "running" else None
                return

    def stop(self, seconds: int) -> None:
        """End the run on each node, unless it is known to be over there; says where it could not be ended."""

        def stop(member: _Member) -> None:
            try:
                for _ in range(3):  # a start may still be on its way
                    if self._row(member):
                        member.node.ask(messages.Stop, seconds + 60, run=self.name, seconds=seconds)
                        return
                    time.sleep(0.5)
            except Refusal as error:
                unknown = f"; the run {self.name} may go on there" if isinstance(error, Broken) else ""
                _say(f"[{member.name}] {error}{unknown}")

        self.each(stop, [member for member in self.members if member.is_started and not member.row])

    def _sum_up(self) -> int:
        code = 0
        for member in self.members:
            state, found = (member.row.state, member.row.exit_code) if member.row else ("unknown", None)
            found = 1 if found is None else _EXIT_SIGNAL - found if found < 0 else found
            said = f", exit code {found}" if found else ""
            _say(f"[{member.name}] {state}{said}: {printable(member.folder)}")
            code = code or found
        return code


def _about(packed: Packed) -> str:
    untracked = packed.untracked
    more = f", {len(untracked)} of them not in git: {', '.join(untracked[:8])}" if untracked else ""
    more += ", ..." if len(untracked) > 8 else ""
    size = packed.file.stat().st_size / 2**20
    return f"packed {len(packed.names)} files of {ROOT}{more} ({size:.1f} MiB, {packed.code[:12]})"


def _address(head: _Member, ssh: Sequence[str]) -> str:
    """Where the nodes meet: as the file says, else the head's one address, else the one by which ssh reaches it."""
    if head.host.address:
        return head.host.address
    assert head.node.report
    own = [address for address in head.node.report.addresses if not is_local(address)]
    plain = [address for address in own if ":" not in address] or own
    if len(plain) == 1:
        return plain[0]
    asked = subprocess.run([*ssh, "-G", "--", head.name], capture_output=True, text=True, check=False).stdout
    found = re.search(r"^hostname (\S+)$", asked, re.MULTILINE)
    if found and found[1] in own:
        return found[1]
    raise Refusal(f"{head.name} has the addresses {', '.join(own) or 'of loopback alone'}; add address=... to its line")


def _show(member: _Member, piece: bytes, is_end: bool) -> None:
    """Whole lines of a log, with the host before each; a log has nothing that a terminal obeys."""
    *lines, member.rest = re.split(b"\r?\n|\r", member.rest + piece)
    lines += [member.rest] if is_end and member.rest else []
    for line in lines:
        print(f"[{member.name}] {printable(line.decode(errors='replace'))}", flush=True)


def _say(line: str) -> None:
    with contextlib.suppress(OSError):  # the terminal may be gone
        print(line, file=sys.stderr, flush=True)
