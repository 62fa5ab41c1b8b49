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
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from titan_fleet.node import messages
from titan_fleet.ssh.client import Broken, Node, ssh_command
from titan_fleet.ssh.hosts import Host, in_planned_order, read_hosts
from titan_fleet.ssh.install import NOT_FOUND, bring_up, program
from titan_fleet.ssh.pack import Packed, packed_checkout
from titan_fleet.ssh.parts import SECONDS_AFTER_A_FAILURE, Job, Part, at_once, end, needs_disk, new_name, start
from torchtitan.config.load import load_config, to_toml
from torchtitan.foreign import printable
from torchtitan.refusal import Refusal
from torchtitan.root import ROOT

_SECONDS_TO_END = 60  # after Ctrl-C: a run may save first
_EXIT_SIGNAL = 128


@dataclass
class _Member(Part):
    """A part, and what it said."""

    end: messages.RunRow | None = None  # how it ended
    rest: bytes = b""  # of the log, without its newline


def run(args: argparse.Namespace, options: Sequence[str]) -> int:
    """The exit code of the run."""
    if not args.hosts:
        raise Refusal("no --hosts is given; name a file with one host a line, or a nodes.toml")
    named, ssh = read_hosts(Path(args.hosts)), shlex.split(args.ssh)
    hosts = in_planned_order(named, Path(args.config))
    if hosts != named:
        _say(f"as planned, ranks are on {', '.join(host.planned_as for host in hosts)}, in this order")
    checked = load_config(["--job.config_file", args.config, *options])
    # A model beside the file lies in the same place of the checkout there; each node's own code checks all again.
    config = to_toml(checked).replace(f'"{ROOT}/', '"')
    if args.prints:
        for rank, host in enumerate(hosts):
            print(f"node {rank} of {len(hosts)}: {shlex.join(ssh_command(host.host, [], ssh)[:-1])}")
        return 0
    name = args.name or new_name(Path(args.config).stem)
    environment = dict(given.split("=", 1) for given in args.env)
    plan = Path(args.config).parent / checked.job.plan if checked.job.plan else None
    said = plan.read_text(encoding="utf-8") if plan and plan.is_file() else ""  # the run says at its end if it is gone
    return run_on_hosts(args, hosts, Job(name, config, needs_disk(checked), environment, said))


def run_on_hosts(
    args: argparse.Namespace, hosts: Sequence[Host], job: Job, then: Callable[[Sequence[Part]], None] = lambda _: None
) -> int:
    """The exit code of the run; if it ended well, `then` gets its parts while they are still connected."""
    if args.image and args.program:
        raise Refusal(f"--image {args.image} sets hosts up, and --program says that they are; drop one of them")
    with packed_checkout() as packed:
        _say(_about(packed))
        launch = _Launch(args, hosts, job, packed)
        with launch.interrupts():
            try:
                at_once(launch.connect, launch.members)
                launch.start()
                if not (code := launch.watch()):
                    then(launch.members)
                return code
            except KeyboardInterrupt:
                _say("ending what was started")
                return _EXIT_SIGNAL + signal.SIGINT
            finally:  # also where nobody reads the output any more
                launch.is_watching = True
                launch.stop(0)
                at_once(lambda member: member.node.close(), launch.members)


class _Launch:
    """All nodes of the run, and what they say."""

    def __init__(self, args: argparse.Namespace, hosts: Sequence[Host], job: Job, packed: Packed) -> None:
        self._job, self._packed, self._home, self._ssh = job, packed, args.home, shlex.split(args.ssh)
        self._brings_up, self._image = not args.program, args.image
        self._command = shlex.split(args.program) if args.program else program(args.home, packed.code)
        self.members = [_Member(host, self._node(host), rank) for rank, host in enumerate(hosts)]
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

    def connect(self, member: _Member) -> None:
        """Reach a host, bring it up if it has no node program, and send it the checkout."""
        if self._image:  # what is there may be another environment
            self._bring_up(member)
        try:
            member.node.connect()
        except Broken as error:
            if not self._brings_up or member.node.exit_code != NOT_FOUND:
                raise Refusal(f"{error}; try: {shlex.join([*self._ssh, member.name])}") from None
            member.node.close()
            _say(f"[{member.name}] has no node program for this checkout: setting it up in {self._home}")
            self._bring_up(member)
            member.node = self._node(member.host)
            member.node.connect()
        if member.node.put(self._packed.file, self._packed.code):
            _say(f"[{member.name}] has taken the checkout")

    def _bring_up(self, member: _Member) -> None:
        def say(line: str) -> None:
            _say(f"[{member.name}] {line}")

        bring_up(member.name, self._packed, self._home, self._ssh, say, self._image)

    def start(self) -> None:
        start(self._job, self._packed.code, self.members, self._ssh)
        for member in self.members:
            member.node.follow(self._job.name, member.log, lambda _, *heard, of=member: self._events.put((of, *heard)))
            _say(f"[{member.name}] node {member.rank} of {len(self.members)}, run folder {member.folder}")

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
            if failed_at is not None and time.monotonic() > failed_at + SECONDS_AFTER_A_FAILURE:
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
                if member.end is None or member.end.state not in ("ended", "stopped"):
                    failed_at = failed_at or time.monotonic()
        return self._sum_up()

    def _take_end(self, member: _Member) -> None:
        for _ in range(3):  # the connection may break at this moment, too
            with contextlib.suppress(Broken):
                row = member.row(self._job.name)
                member.end = row if row and row.state != "running" else None
                member.may_run = member.end is None
                return

    def stop(self, seconds: int) -> None:
        for why in end(self._job.name, self.members, seconds):
            _say(why)

    def _sum_up(self) -> int:
        code = 0
        for member in self.members:
            state, found = (member.end.state, member.end.exit_code) if member.end else ("unknown", None)
            found = 1 if found is None else _EXIT_SIGNAL - found if found < 0 else found
            said = f", exit code {found}" if found else ""
            _say(f"[{member.name}] {state}{said}: {member.folder}")
            code = code or found
        return code


def _about(packed: Packed) -> str:
    untracked = packed.untracked
    more = f", {len(untracked)} of them not in git: {', '.join(untracked[:8])}" if untracked else ""
    more += ", ..." if len(untracked) > 8 else ""
    size = packed.file.stat().st_size / 2**20
    return f"packed {len(packed.names)} files of {ROOT}{more} ({size:.1f} MiB, {packed.code[:12]})"


def _show(member: _Member, piece: bytes, is_end: bool) -> None:
    """Whole lines of a log, with the host before each; a log has nothing that a terminal obeys."""
    *lines, member.rest = re.split(b"\r?\n|\r", member.rest + piece)
    lines += [member.rest] if is_end and member.rest else []
    for line in lines:
        print(f"[{member.name}] {printable(line.decode(errors='replace'))}", flush=True)


def _say(line: str) -> None:
    with contextlib.suppress(OSError):  # the terminal may be gone
        print(line, file=sys.stderr, flush=True)
