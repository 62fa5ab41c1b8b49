"""What a person can do to runs, by the API or by a page. Both come here for the role and the audit log."""

import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from titan_fleet.console import links
from titan_fleet.console.answers import (
    MOST_TAGS,
    CheckText,
    DesignRow,
    Done,
    ExportCheckpoint,
    GenerateText,
    Made,
    PlanText,
    Proposal,
    Run,
    SaveDesign,
    Started,
    StartRun,
    Submission,
    SubmitRun,
    TagRun,
)
from titan_fleet.console.database import Audit, Kept
from titan_fleet.console.door.people import People, Person
from titan_fleet.console.library import Entry, Library
from titan_fleet.console.nodes import HERE, Member, Nodes
from titan_fleet.console.resume import plan_resume
from titan_fleet.console.text import inert
from titan_fleet.console.verbs.call import call
from titan_fleet.console.verbs.proposals import propose
from titan_fleet.console.verbs.submissions import submit
from titan_fleet.node import messages
from titan_fleet.node.checkpoints import EXPORT_SECONDS, GENERATE_SECONDS
from titan_fleet.ssh.install import bring_up
from titan_fleet.ssh.pack import packed_checkout
from titan_fleet.ssh.parts import Job, Part, at_once, needs_disk, new_name, start
from titan_fleet.ssh.probe import probe_of
from torchtitan.config.load import ConfigError, check_text
from torchtitan.refusal import Refusal
from torchtitan.root import ROOT

_CHECK_SECONDS, _FETCH_SECONDS = 120, 660
_MOST_CHECKS = 2  # processes at a time
DEBUG_MODEL = "debug_model"


class Actions:
    def __init__(self, home: Path, library: Library, nodes: Nodes, people: People, audit: Audit, kept: Kept) -> None:
        self._home, self._library, self._nodes, self._kept = home / "console", library, nodes, kept
        self._people, self._audit = people, audit
        self._checks = threading.Semaphore(_MOST_CHECKS)

    @contextmanager
    def _done_by(self, person: Person, role: str, what: str, target: str) -> Iterator[None]:
        """Inside, the person is known to have the role; how it ends is written down."""
        self._need(person, role, what, target)
        outcome = "done"
        try:
            yield
        except BaseException as error:
            outcome = f"{'refused' if isinstance(error, Refusal) else 'failed'}: {error}"
            raise
        finally:
            self._audit.write(person.name, person.address, what, target, outcome)

    def _need(self, person: Person, role: str, what: str, target: str) -> None:
        """A refusal is written down."""
        try:
            if not self._people.is_still(person):
                raise Refusal(f"the token of {person.name} was revoked; log in with another")
            person.need(role)
        except Refusal as error:
            self._audit.write(person.name, person.address, what, target, f"refused: {error}")
            raise

    def check(self, person: Person, wish: CheckText) -> list[str]:
        """All mistakes of a configuration. `whole` runs `check` in a process of its own: it may load a model."""
        self._need(person, "operator", "check", "a configuration")
        try:
            check_text(wish.config, "the configuration")
        except ConfigError as error:
            return error.mistakes
        return self._check_whole(wish.config) if wish.whole else []

    def _check_whole(self, text: str) -> list[str]:
        if not self._checks.acquire(timeout=30):
            raise Refusal("two other configurations are being checked; ask again in a moment")
        try:
            with tempfile.TemporaryDirectory(dir=self._home) as folder:
                file = Path(folder) / "train.toml"
                file.write_text(text, encoding="utf-8")
                done = call(["check", str(file)], _CHECK_SECONDS, "look at this machine")
                said = done.stderr.decode(errors="replace").replace(f"{file}: ", "").strip()
        finally:
            self._checks.release()
        return [line.strip() for line in said.splitlines()] or ["`check` fails"] if done.returncode else []

    def plan(self, person: Person, wish: PlanText) -> list[Proposal]:
        """The planner's best layouts for these nodes."""
        members = [self._nodes.find(name) for name in wish.nodes or [HERE]]
        self._need(person, "operator", "plan", f"layouts on {', '.join(member.name for member in members)}")
        if not self._checks.acquire(timeout=30):
            raise Refusal("two other configurations are being checked; ask again in a moment")
        try:
            return propose(self._home, wish.config, wish.machines, members)
        finally:
            self._checks.release()

    def start(self, person: Person, wish: StartRun, again: str = "") -> Started:
        """Start a run on its nodes, rank 0 on the first; if one refuses, none goes on. `again` is resume's code."""
        members = [self._nodes.find(name) for name in wish.nodes or [HERE]]
        if len(set(wish.nodes)) < len(wish.nodes):
            raise Refusal(f"nodes = {', '.join(wish.nodes)} names one twice; name each once")
        code: messages.Code | None = again or wish.code
        target = f"{wish.name} on {', '.join(member.name for member in members)}"
        target += f", {code.git} at {code.commit}" if isinstance(code, messages.Git) else ""
        with self._done_by(person, "operator", "resume" if again else "start", target):
            is_shared = needs_disk(check_text(wish.config, wish.name))
            job = Job(wish.name, wish.config, is_shared, plan=wish.plan, again=bool(again))
            parts = self._start(job, members, code)
        return Started(id=self._library.id_of(members[0].name, parts[0].folder), name=wish.name)

    def _start(self, job: Job, members: Sequence[Member], code: messages.Code | None = None) -> list[Part]:
        """Start it with code that is there or that the nodes fetch, or with the checkout of this console."""
        parts = [Part(member.host, member.node, rank) for rank, member in enumerate(members)]
        if isinstance(code, messages.Git):
            at_once(lambda part: part.node.ask(messages.Has, _FETCH_SECONDS, code=code), parts)
        elif code is None:
            with packed_checkout() as packed:
                at_once(lambda part: part.node.put(packed.file, packed.code), parts)
            code = packed.code
        start(job, code, parts, self._nodes.ssh)
        return parts

    def measure(self, person: Person) -> None:
        """Measure the links between all other machines that are connected; this takes a minute or more."""
        members = [one for one in self._nodes.members.values() if not one.is_here and not one.trouble]
        with self._done_by(person, "operator", "measure", f"links of {', '.join(m.name for m in members)}"):
            job = probe_of([member.host for member in members])
            links.take(job.name, self._start(job, members), self._nodes.links)

    def start_debug_model(self, person: Person) -> Started:
        text = shipped()[DEBUG_MODEL]
        return self.start(person, StartRun(config=text, name=new_name(DEBUG_MODEL)))

    def resume(self, person: Person, id: str) -> Started:
        """Go on with a run that is over, on its nodes, in its folder and with its code, from its newest checkpoint."""
        self._need(person, "operator", "resume", self._library.find(id).page.name)
        first = self._parts(id)[0].row  # a resume that was refused half way leaves parts which do not meet
        parts = [one for one in self._library.entries() if one.row.is_own and one.row.run == first.run]
        parts = [one for one in parts if one.row.nodes == first.nodes] if (first.nodes or 1) > 1 else self._parts(id)
        parts.sort(key=lambda part: part.row.rank or 0)
        wish, code = plan_resume(parts)
        for part in parts:
            if part.row.state == "lost":  # its keeper is gone; this ends what may be left
                part.member.node.ask(messages.Stop, 60, run=wish.name, seconds=0)
        return self.start(person, wish, code)

    def stop(self, person: Person, id: str, seconds: int = 60) -> Done:
        """Ask every node of the run to end; returns when none of its processes is left."""
        entries = self._parts(id)
        with self._done_by(person, "operator", "stop", entries[0].page.name):
            wish: dict[str, Any] = {"run": entries[0].row.run, "seconds": seconds}
            answers = at_once(lambda entry: entry.member.node.ask(messages.Stop, seconds + 60, **wish), entries)
        self._library.refresh()
        return Done(state=answers[0].state)

    def delete(self, person: Person, id: str) -> Done:
        """Delete the run on all its nodes; refused while one of them still runs its part."""
        entries = self._parts(id)
        name, run = entries[0].page.name, entries[0].row.run
        parts = [Part(one.member.host, one.member.node, one.row.rank or 0) for one in entries]
        freed: list[int] = []
        with self._done_by(person, "admin", "delete", name):
            rows = zip(parts, at_once(lambda part: part.row(run), parts), strict=True)
            if running := [part.name for part, row in rows if row and row.state == "running"]:
                raise Refusal(f"run = {name} still runs on {', '.join(running)}; stop it first")
            for part in parts:
                try:
                    freed.append(part.node.ask(messages.Delete, 300, run=run).freed_bytes)
                except Refusal:
                    if not freed or part.row(run):  # else a node before shares its disk, and has deleted it
                        raise
            self._kept.forget([entry.page.id for entry in entries])
        self._library.refresh()
        return Done(freed_bytes=sum(freed))

    def generate(self, person: Person, id: str, wish: GenerateText) -> Made:
        """Continue a text with a checkpoint; what comes back is made inert."""
        entry = self._library.find(id)
        with self._done_by(person, "operator", "generate", f"{entry.page.name} {wish.checkpoint}"):
            given = wish.model_dump() | {"checkpoint": self._library.checkpoint(id, wish.checkpoint)}
            answer = entry.member.node.ask(messages.Generate, GENERATE_SECONDS + 60, run=entry.row.run, **given)
        return Made(text=inert(answer.made.encode()))

    def export(self, person: Person, id: str, wish: ExportCheckpoint) -> Made:
        """Write a checkpoint for Hugging Face below the run's folder."""
        entry = self._parts(id)[0]
        with self._done_by(person, "operator", "export", f"{entry.page.name} {wish.checkpoint}"):
            given = {"run": entry.row.run, "checkpoint": self._library.checkpoint(id, wish.checkpoint)}
            answer = entry.member.node.ask(messages.Export, EXPORT_SECONDS + 60, **given)
        return Made(folder=inert(answer.made.encode()))

    def submit(self, person: Person, wish: SubmitRun) -> Submission:
        """Hand a run to a scheduler, or show the script for it."""
        given = person, "operator", "submit", f"{wish.name} to {wish.site}"
        if wish.only_print:
            self._need(*given)
            return submit(self._library.shown[0], wish)
        with self._done_by(*given):
            return submit(self._library.shown[0], wish)

    def install(self, person: Person, name: str) -> None:
        """Copy the checkout to a bare host and make its environment; this takes minutes."""
        member = self._nodes.find(name)
        with self._done_by(person, "admin", "install", name):
            if member.is_here:
                raise Refusal(f"node = {name} has the recipe already; name a host of the file of nodes")
            with packed_checkout() as packed:
                bring_up(name, packed, self._nodes.remote_home, self._nodes.ssh, lambda line: None)

    def tag(self, person: Person, id: str, wish: TagRun) -> Run:
        """Add and remove tags of a run, on each of its nodes."""
        page = self._library.find(id).page
        words = [*(f"+{tag}" for tag in wish.add), *(f"-{tag}" for tag in wish.remove)]
        with self._done_by(person, "operator", "tag", " ".join([page.name, *words])):
            if (number := len({*page.tags, *wish.add} - {*wish.remove})) > MOST_TAGS:
                raise Refusal(f"{page.name} would have {number} tags; keep at most {MOST_TAGS}, and remove some")
            self._kept.tag([entry.page.id for entry in self._library.parts_of(self._library.find(id))], wish)
        self._library.refresh()
        return self._library.find(id).page

    def save_design(self, person: Person, wish: SaveDesign) -> DesignRow:
        with self._done_by(person, "operator", "save design", wish.name):
            return self._kept.save_design(person.name, wish)

    def delete_design(self, person: Person, name: str, version: int) -> None:
        with self._done_by(person, "operator", "delete design", name):
            self._kept.delete_design(name, version)

    def _parts(self, id: str) -> list[Entry]:
        """The run on each of its nodes; refused where this console may only read it."""
        entry = self._library.find(id)
        if not entry.page.is_own:
            why = "was not started by a node program, so it can only be read; use the place where it was started"
            raise Refusal(f"run = {entry.page.name} {why}")
        return self._library.parts_of(entry)


def shipped() -> dict[str, str]:
    """The configurations that come with the recipe: name -> text."""
    files = sorted((ROOT / "train_configs").glob("*.toml"))
    return {file.stem: file.read_text(encoding="utf-8") for file in files}
