"""The nodes of a console: this machine, and those of nodes.toml. A thread for each asks for its report and its runs."""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from titan_fleet.console.answers import NodePage
from titan_fleet.console.text import inert
from titan_fleet.node import messages
from titan_fleet.ssh.client import Broken, Node, local_command, ssh_command
from titan_fleet.ssh.hosts import Host, read_hosts
from titan_fleet.ssh.install import NOT_FOUND
from titan_fleet.ssh.parts import at_once
from torchtitan.refusal import Refusal
from torchtitan.root import ROOT, VERSION

HERE = "this machine"
_SECONDS = 5  # between two reports
_PAUSE_SECONDS = 0.05  # between two answers with changed runs, while somebody looks at runs
_ASKED_SECONDS = 10
_HOUR = 3600 // _SECONDS
# The installed command, else the checkout that was set up there last. A key with a forced command runs that instead.
_PROGRAM = """
there=$1; shift
if command -v torchtitan-recipe >/dev/null; then exec torchtitan-recipe node "$@"; fi
cd; cd "$there" 2>/dev/null && home=$(pwd -P) && last=$(ls -t code/*.python 2>/dev/null | head -n 1) &&
python=$(readlink "$last") && cd "${last%.python}" || exit 127
exec "$python" -m torchtitan node --home "$home" "$@"
"""


class Member:
    """A node, and what it said last."""

    def __init__(self, host: Host, node: Node, is_here: bool) -> None:
        self.host, self.name, self.node, self.is_here = host, host.host, node, is_here
        self.report: messages.ReportAnswer | None = None
        self.runs: Sequence[messages.RunRow] = ()
        self.last_seen: float | None = None
        self.trouble = "it has not answered yet"
        self._runs_trouble = ""  # why its runs are as they were
        self._utilisation: deque[float] = deque(maxlen=_HOUR)
        self._is_over = threading.Event()

    def start(self, is_asked: Callable[[], bool]) -> None:
        threading.Thread(target=self._watch, daemon=True, name=f"watch {self.name}").start()
        if not self.is_here:
            threading.Thread(target=self._follow_runs, args=(is_asked,), daemon=True, name=f"runs {self.name}").start()

    def close(self) -> None:
        self._is_over.set()
        self.node.close()

    def _watch(self) -> None:
        with suppress(Broken):  # the node goes on trying
            self.node.connect()
        while not self._is_over.is_set():
            try:
                self.report = self.node.ask(messages.Report, 30)
                self.last_seen, self.trouble = time.time(), ""
                self._utilisation.append(_utilisation(self.report))
            except Refusal as error:
                self.trouble = inert(str(error).encode())
            self._is_over.wait(_SECONDS)

    def _follow_runs(self, is_asked: Callable[[], bool]) -> None:
        """While somebody looks at runs, the node answers as soon as its runs have changed."""
        mark, pause = "", 0.0
        while not self._is_over.wait(pause):
            pause = _PAUSE_SECONDS if is_asked() else _SECONDS
            try:
                answer = self.node.ask(messages.Runs, 30, known=mark, seconds=_SECONDS)
                self.runs, mark = answer.runs, answer.mark if is_asked() else ""
                self._runs_trouble = ""
            except Refusal as error:
                pause, self._runs_trouble = _SECONDS, inert(str(error).encode())
                if isinstance(error, Broken):  # known at once, so that nobody waits for this node
                    self.trouble = self._runs_trouble

    @property
    def is_bare(self) -> bool:
        """Whether the host answers, and has no node program."""
        return not self.is_here and bool(self.trouble) and self.node.exit_code == NOT_FOUND

    def page(self, own: messages.ReportAnswer | None) -> NodePage:
        versions: list[tuple[str, str | None, str | None]] = []
        if (report := self.report) and own:
            versions = [("recipe", report.version, VERSION), ("torch", report.torch, own.torch)]
            versions += [("Python", report.python, own.python)]
        differs = [f"{what} {its or 'none'}, here {ours or 'none'}" for what, its, ours in versions if its != ours]
        names = ("name", "is_here", "is_bare", "last_seen", "report")
        known: dict[str, Any] = {name: getattr(self, name) for name in names}
        known["trouble"] = self.trouble or self._runs_trouble
        busy = list(self._utilisation)
        return NodePage(**known, is_connected=not self.trouble, differs=differs, utilisation=busy)


class Nodes:
    def __init__(
        self,
        home: Path,
        file: Path | None,
        ssh: Sequence[str],
        remote_home: str,
        shown: Sequence[Path] = (),
        links: Path = Path("clusters/here.toml"),
        git: Sequence[str] = (),
    ) -> None:
        self.ssh, self.remote_home, self.links, self._git = ssh, remote_home, links, git
        allowed = [word for address in git for word in ("--git", address)]
        watched = [word for path in shown for word in ("--watch", str(path.expanduser().resolve()))]
        here = Node(HERE, [*local_command(str(home)), *allowed, *watched], cwd=ROOT)
        self.members = {HERE: Member(Host(host=HERE), here, is_here=True)}
        for host in read_hosts(file) if file else ():
            watched = [word for folder in host.watch for word in ("--watch", folder)]
            program = ["sh", "-c", _PROGRAM, "sh", remote_home, *allowed, *watched]
            node = Node(host.host, ssh_command(host.host, program, ssh))
            self.members[host.host] = Member(host, node, is_here=False)

        self._asked = 0.0

    def start(self) -> None:
        for member in self.members.values():
            member.start(self.is_asked)

    def ask_soon(self) -> None:
        """Somebody looks at runs: for some seconds, changes are looked for often."""
        self._asked = time.monotonic()

    def is_asked(self) -> bool:
        return time.monotonic() - self._asked < _ASKED_SECONDS

    def close(self) -> None:
        at_once(lambda member: member.close(), list(self.members.values()))

    def find(self, name: str) -> Member:
        if name not in self.members:
            raise Refusal(f"node = {name[:80]!a} is not known; use one of {', '.join(self.members)}")
        return self.members[name]

    @property
    def may_fetch(self) -> bool:
        """Whether some node takes code from a repository."""
        return bool(self._git or [one for one in self.members.values() if one.report and one.report.git])

    def pages(self) -> list[NodePage]:
        return [self.page(name) for name in self.members]

    def page(self, name: str) -> NodePage:
        return self.members[name].page(self.members[HERE].report)


def _utilisation(report: messages.ReportAnswer) -> float:
    shares = [device.utilisation for device in report.devices if device.utilisation is not None]
    share = sum(shares) / len(shares) if shares else report.load / max(1, report.cores)
    return round(min(1.0, share), 3)
