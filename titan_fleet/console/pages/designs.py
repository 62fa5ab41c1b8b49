"""Saved designs, in a dialog over the form of a new run: save, open, clone, delete."""

from typing import Any, Protocol

from nicegui import ui

from titan_fleet.console.answers import DesignRow, SaveDesign
from titan_fleet.console.door.people import Person
from titan_fleet.console.library import age
from titan_fleet.console.pages.frame import Parts, asking, confirmed, do
from titan_fleet.console.verbs.proposals import data_sheets
from titan_fleet.node.messages import ValidationError, why
from torchtitan.refusal import Refusal


class Form(Protocol):
    """What a design holds, as the page has it. `version` is 0 as long as no saved design is open."""

    editor: ui.codemirror
    nodes: ui.select
    machines: str
    design: str
    version: int

    def begin(self, text: str, name: str, version: int = 0) -> None: ...


async def choose_design(parts: Parts, person: Person, form: Form) -> None:
    with asking("Designs") as dialog:
        with ui.element("div").classes("line w-full"):
            name = ui.input("Name of the design", value=form.design).props("maxlength=80").classes("grow")
            save = ui.button("Save").props("unelevated")
        holder = ui.element("div").classes("rows w-full")
        ui.button("Back", on_click=dialog.close).props("flat")

    async def show() -> None:
        rows = await do(parts.kept.designs)
        holder.clear()
        with holder:
            for row in rows or []:
                _show(row)
            if not rows:
                ui.label("None is saved yet.").classes("dim")

    def _show(row: DesignRow) -> None:
        with ui.element("div").classes("line"):
            ui.label(row.name).style("overflow-wrap: anywhere")
            ui.label(f"by {row.who}, {age(row.changed)} ago; {', '.join(row.nodes)}").classes("dim small grow")
            for word, act in (("Open", open_it), ("Clone", clone), ("Delete", delete)):
                button = ui.button(word, on_click=lambda act=act: act(row)).props("outline")
                button.props(f'aria-label="{word} {row.name}"')

    async def keep() -> None:
        if saved := await do(_save, parts, person, form, str(name.value)):
            form.design, form.version = saved.name, saved.version
            ui.notify(f"Saved {saved.name}")
            dialog.close()

    async def open_it(row: DesignRow, suffix: str = "") -> None:
        if (design := await do(parts.kept.design, row.name)) is None:
            ui.notify(f"The design {row.name} is not there any more", type="warning")
        else:
            form.begin(design.config, design.name + suffix, 0 if suffix else design.version)
            form.machines = design.machines if design.machines in data_sheets() else form.machines
            known = [node for node in design.nodes if node in parts.nodes.members]
            form.nodes.value = known or form.nodes.value
            if gone := ", ".join(node for node in design.nodes if node not in known):
                ui.notify(f"The console does not know {gone} any more; choose other nodes", type="warning")
            dialog.close()

    async def clone(row: DesignRow) -> None:
        await open_it(row, "-copy")

    async def delete(row: DesignRow) -> None:
        if await confirmed(f"Delete the design {row.name}?", "Delete"):
            await do(parts.actions.delete_design, person, row.name, row.version)
            await show()

    save.on_click(keep)
    await show()
    await dialog


def _save(parts: Parts, person: Person, form: Form, name: str) -> DesignRow:
    wish: dict[str, Any] = {"name": name, "config": form.editor.value, "nodes": form.nodes.value}
    try:
        version = form.version if name == form.design else 0
        made = SaveDesign(**wish, machines=form.machines, version=version)
    except ValidationError as error:
        raise Refusal(f"the design cannot be kept: {why(error)}; use letters, digits, . _ and - in its name") from None
    return parts.actions.save_design(person, made)
