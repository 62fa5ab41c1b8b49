"""This machine and those of the file of nodes: devices, memory, utilisation of the last hour, versions, last seen."""

from nicegui import ui

from titan_fleet.console.answers import NodePage
from titan_fleet.console.door.people import Person
from titan_fleet.console.library import age
from titan_fleet.console.links import read_links
from titan_fleet.console.pages.charts import chart, draw, draw_map
from titan_fleet.console.pages.frame import Parts, do, framed, heading, size, table
from titan_fleet.node.messages import ReportAnswer

_SECONDS = 5
_DEVICES = [("name", "Device"), ("memory", "Memory used"), ("utilisation", "Utilisation")]
_MAPS = ("Gbit/s from a row to a column", "Delay in ms")
_MORE = (
    "More machines: write a nodes.toml with a [[node]] and its host for each, and start the console with "
    "--nodes nodes.toml. docs/fleet/console.md shows how, also for machines that cannot be reached from here."
)


def add(parts: Parts) -> None:
    @ui.page("/nodes", dark=None)
    def nodes() -> None:
        with framed("Nodes") as person:
            heading("Nodes")
            _add_links(parts, person)
            views = [_NodeView(parts, person, node) for node in parts.nodes.pages()]
            ui.label(_MORE).classes("dim small")

        def show() -> None:
            for view, node in zip(views, parts.nodes.pages(), strict=True):
                view.show(node)

        show()
        ui.timer(_SECONDS, show)


def _add_links(parts: Parts, person: Person) -> None:
    """The map of the links, once a probe has written one."""
    with ui.element("section").classes("node") as section:
        with ui.element("div").classes("line"):
            heading("Links", 2)
            about = ui.label().classes("dim small")
            button = ui.button("Measure links").props("outline")
        with ui.element("div").classes("charts") as charts:
            maps = [chart(title) for title in _MAPS]

    def show() -> None:
        links = read_links(parts.nodes.links)
        charts.visible, about.text = links is not None, links.rests_on if links else ""
        button.visible = person.may("operator") and len(parts.nodes.members) > 2
        section.visible = charts.visible or button.visible
        for target, title, values in zip(maps, _MAPS, (links.gbit, links.delay_ms) if links else (), strict=False):
            draw_map(target, title, links.hosts if links else (), values, best=title == _MAPS[0])

    async def measure() -> None:
        button.disable()
        ui.notify("Measuring the links between the other machines; this takes a minute or more, and slows runs there")
        await do(parts.actions.measure, person)
        button.enable()
        show()

    button.on_click(measure)
    show()


class _NodeView:
    """One node on the page."""

    def __init__(self, parts: Parts, person: Person, node: NodePage) -> None:
        self._parts, self._person, self._name = parts, person, node.name
        with ui.element("section").classes("node"):
            with ui.element("div").classes("line"):
                heading(node.name, 2)
                self.state = ui.label().classes("state")
                self.versions = ui.label().classes("dim small")
                self.differs = ui.label().classes("warn small")
            self.trouble = ui.label().classes("trouble small")
            self.install = ui.button("Install the recipe there", on_click=self._install).props("outline")
            self.install.style("align-self: start")
            self.facts = ui.label().classes("number")
            self.devices = table(_DEVICES, "key", ("memory", "utilisation")).props("hide-pagination")
            self.chart = chart("Utilisation").style("height: 150px")
        self._drawn: float | None = None

    def show(self, node: NodePage) -> None:
        self.state.text = "connected" if node.is_connected else f"away, seen {age(node.last_seen) or 'never'}"
        self.state.classes(replace=f"state {'connected' if node.is_connected else 'away'}")
        self.differs.text = "; ".join(node.differs)
        self.trouble.text = node.trouble
        self.trouble.visible = bool(node.trouble)
        self.install.visible = node.is_bare and self._person.may("admin")
        for view in (self.versions, self.facts, self.devices, self.chart):
            view.visible = node.report is not None
        if report := node.report:
            self._show_report(node, report)

    def _show_report(self, node: NodePage, report: ReportAnswer) -> None:
        versions = f"recipe {report.version}, torch {report.torch or 'none'}, Python {report.python}"
        self.versions.text = f"{versions}, {report.platform}"
        memory = f"memory {size(report.used_bytes or 0)} of {size(report.memory_bytes)} used"
        disk = f"{size(report.free_bytes)} free on disk"
        self.facts.text = f"{report.cores} cores, load {report.load:.2f}; {memory}; {disk}"
        self.devices.rows = [
            {"key": number, "name": f"{number}: {one.name}"}
            | {"memory": f"{size(one.used_bytes)} of {size(one.memory_bytes)}"}
            | {"utilisation": "" if one.utilisation is None else f"{one.utilisation:.0%}"}
            for number, one in enumerate(report.devices)
        ]
        self.devices.visible = bool(report.devices)
        if node.last_seen != self._drawn:
            self._drawn = node.last_seen
            points = [((i - len(node.utilisation) + 1) / 12, 100 * y) for i, y in enumerate(node.utilisation)]
            name = "Devices busy, %" if report.devices else "Cores busy, %"
            draw(self.chart, name, {name: points}, ("minutes", False, 0), most=100)

    async def _install(self) -> None:
        self.install.disable()
        ui.notify(f"Copying the checkout to {self._name} and installing its packages; this takes minutes")
        await do(self._parts.actions.install, self._person, self._name)
        self.install.enable()
