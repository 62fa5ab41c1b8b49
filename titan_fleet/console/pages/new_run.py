"""A new run: a configuration in an editor that is checked as one types, the nodes, a review, and the start."""

import difflib
from base64 import b64encode

from nicegui import ui

from titan_fleet.console.actions import DEBUG_MODEL, shipped
from titan_fleet.console.answers import CheckText, PlanText, Proposal, StartRun
from titan_fleet.console.door.people import Person
from titan_fleet.console.library import Library
from titan_fleet.console.nodes import HERE
from titan_fleet.console.pages import keys
from titan_fleet.console.pages.designs import choose_design
from titan_fleet.console.pages.frame import Parts, asking, choose, do, framed, heading
from titan_fleet.console.pages.submit import submit
from titan_fleet.console.verbs.proposals import data_sheets
from titan_fleet.console.verbs.submissions import sites
from titan_fleet.node.messages import Git, ValidationError, why
from titan_fleet.ssh.parts import new_name
from torchtitan.refusal import Refusal

_SECONDS = 0.4  # between what one types and the check
_NODE_SECONDS = 60  # in which a node gives the configuration of a run


def add(parts: Parts) -> None:
    @ui.page("/new", dark=None, response_timeout=_NODE_SECONDS)
    async def new_run(source: str = "") -> None:
        with framed("New run") as person:
            heading("New run")
            if not person.may("operator"):
                ui.label(f"{person.name} is {person.role}; an operator can start runs.").classes("dim")
                return
            cloned = await do(_read, parts.library, source) if source else None
            Form(parts, person, *(cloned or (DEBUG_MODEL, shipped()[DEBUG_MODEL])))


def _read(library: Library, id: str) -> tuple[str, str]:
    return library.find(id).page.name, library.configuration(id)


class Form:
    """`origin` is the text from which the configuration started, `design` the saved one that is open, if one is."""

    def __init__(self, parts: Parts, person: Person, name: str, text: str) -> None:
        self._parts, self._person, self.origin = parts, person, text
        self._texts = shipped()
        self._checked, self._plan, self.machines = "", "", "h100_1x8"
        self.design, self.version = name, 0
        with ui.element("div").classes("line"):
            known = [*self._texts, *([name] if name not in self._texts else [])]
            start = ui.select(known, value=name, label="Start from").style("min-width: 220px")
            self.name = ui.input("Name of the run", value=new_name(name)).props("maxlength=80")
            nodes = list(parts.nodes.members)
            self.nodes = ui.select(nodes, value=[HERE], multiple=True, label="Nodes, rank 0 first")
            self.nodes.props("use-chips").style("min-width: 220px")
            ui.element("div").classes("grow")
            if found := sites():
                ui.button("Submit", on_click=lambda: self.submit(found)).props("outline")
            ui.button("Designs", on_click=lambda: choose_design(parts, person, self)).props("outline")
            ui.button("Plan", on_click=self.plan).props("outline")
            self.review_button = ui.button("Review", on_click=self.review).props("unelevated")
        with ui.element("div").classes("line") as code:
            self.git = ui.input("Git repository, if not this checkout").props("maxlength=512").classes("grow")
            self.commit = ui.input("Its commit, 40 digits").props("maxlength=40").classes("grow")
        code.visible = parts.nodes.may_fetch
        with ui.element("div").classes("split"):
            self.editor = ui.codemirror(self.origin, language="TOML", theme="basicLight", line_wrapping=True)
            self.editor.props('aria-label="Configuration"')
            with ui.element("div"):
                ui.label("Mistakes").style("font-weight: 600")
                self.mistakes = ui.label("").classes("mono").style("white-space: pre-wrap; overflow-wrap: anywhere")
                with ui.element("div").style("margin-top: 14px"):
                    keys.add_lookup()
        start.on_value_change(lambda event: self.take(event.value))
        ui.timer(_SECONDS, self.check)

    def take(self, name: str) -> None:
        if name in self._texts:
            self.begin(self._texts[name], name)

    def begin(self, text: str, name: str, version: int = 0) -> None:
        """Start from a text; a version above 0 is that of the design with this name."""
        self.origin = self.editor.value = text
        self.design, self.version = name, version
        self.name.value, self._plan = new_name(name), ""

    async def check(self) -> None:
        text = str(self.editor.value)
        if text == self._checked:
            return
        self._checked = text
        found = await do(self._parts.actions.check, self._person, CheckText(config=text[: 2**18]))
        self._say(found)

    def _say(self, mistakes: list[str] | None) -> None:
        if mistakes is not None:
            self.mistakes.text = "\n\n".join(mistakes) or "none"
            self.mistakes.classes(replace=f"mono {'bad' if mistakes else 'good'}")

    async def plan(self) -> None:
        """Layouts that the planner proposes on the chosen nodes; one of them may replace the configuration."""
        with asking(f"Layouts on {', '.join(self.nodes.value)}", 900) as dialog:
            with ui.element("div").classes("line"):
                sheet = ui.select(data_sheets(), label="Machines like").bind_value(self, "machines")
                sheet.style("min-width: 160px")
                search = ui.button("Search").props("unelevated")
            holder = ui.element("div").classes("w-full")
            ui.button("Back", on_click=dialog.close).props("flat")

        async def found() -> None:
            search.disable()
            wish = PlanText(config=str(self.editor.value)[: 2**18], machines=str(sheet.value), nodes=self.nodes.value)
            proposals = await do(self._parts.actions.plan, self._person, wish)
            search.enable()
            holder.clear()
            with holder:
                for number, proposal in enumerate(proposals or [], 1):
                    self._show(number, proposal, dialog)

        search.on_click(found)
        await dialog

    def _show(self, number: int, proposal: Proposal, dialog: ui.dialog) -> None:
        def take() -> None:
            self.editor.value, self._plan = proposal.config, proposal.plan
            dialog.close()

        with ui.element("div").classes("line"):
            ui.label(f"{number}. {proposal.layout}").classes("grow")
            ui.label(f"{proposal.seconds:.3f} s a step, {proposal.memory_gib:.1f} GiB").classes("dim")
            ui.button("Take", on_click=take).props("outline")
        if number == 1:
            ui.label(f"rests on {proposal.rests_on}").classes("small")
        if proposal.drawing:
            with ui.expansion("the pipeline over time"):
                picture = b64encode(proposal.drawing.encode()).decode()
                ui.image(f"data:image/svg+xml;base64,{picture}").props('fit=contain alt="stages over time"')

    async def submit(self, found: list[str]) -> None:
        await submit(self._parts, self._person, found, str(self.editor.value), str(self.name.value))

    async def review(self) -> None:
        """The difference to where it started, what this machine lacks, and what will be done."""
        text = str(self.editor.value)
        self.review_button.disable()
        mistakes = await do(self._parts.actions.check, self._person, CheckText(config=text[: 2**18], whole=True))
        self.review_button.enable()
        self._say(mistakes)
        if mistakes is None:
            return
        before, now = self.origin.splitlines(), text.splitlines()
        diff = "\n".join(difflib.unified_diff(before, now, "before", "now", lineterm=""))
        with asking(f"Review of {self.name.value}") as dialog:
            ui.label("Each node runs, and goes on when the console ends:").classes("dim")
            ui.label("\n".join(self._commands())).classes("diff mono w-full")
            ui.label(diff or "The configuration is as it was.").classes("diff mono w-full")
            if mistakes:
                ui.label("`check` on this machine says:\n" + "\n".join(mistakes)).classes("trouble mono")
            choose(dialog, "Start").set_enabled(not mistakes or self.nodes.value != [HERE])
        if await dialog:
            await self.start(text)

    def _commands(self) -> list[str]:
        """One for each node, in its copy of the code."""
        members, lines = [self._parts.nodes.find(name) for name in self.nodes.value], []
        for rank, member in enumerate(members):
            run = f"{member.report.home if member.report else '~'}/runs/{self.name.value}"
            of = f"NNODES={len(members)} NODE_RANK={rank} MASTER_ADDR={members[0].host.address or members[0].name} "
            ranks = "" if member.host.gpus is None else f"NGPU={max(1, member.host.gpus)} "
            place = (of if len(members) > 1 else "") + ranks + f"CONFIG_FILE={run}/node/{rank}/job.toml"
            options = f"--job.dump_folder {run}" + " --job.plan plan.json" * bool(self._plan)
            lines.append(f"{member.name}: {place} python -m torchtitan.tools.start {options}")
        return lines

    async def start(self, text: str) -> None:
        self.review_button.disable()
        ui.notify("Sending the code and starting")
        started = await do(self._start, text, str(self.name.value), list(self.nodes.value))
        self.review_button.enable()
        if started is not None:
            ui.navigate.to(f"/run/{started}")

    def _start(self, text: str, name: str, nodes: list[str]) -> str:
        address, commit = (str(field.value or "").strip() for field in (self.git, self.commit))
        try:
            code = Git(git=address, commit=commit) if address else None
            wish = StartRun(config=text, name=name, nodes=nodes, code=code, plan=self._plan)
        except ValidationError as error:
            fix = "a name has letters, digits, . _ and -, a commit the 40 digits of `git rev-parse HEAD`"
            raise Refusal(f"{why(error)}; {fix}") from None
        return self._parts.actions.start(self._person, wish).id
