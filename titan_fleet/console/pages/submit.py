"""Submits what *New run* holds to a scheduler: the form, the script as it will be sent, and the button."""

from typing import Any

from nicegui import ui

from titan_fleet.console.answers import SubmitRun
from titan_fleet.console.door.people import Person
from titan_fleet.console.pages.frame import Parts, asking, choose, do


async def submit(parts: Parts, person: Person, sites: list[str], config: str, name: str) -> None:
    """A dialog. The script is shown for what the form holds now, and what was shown is sent."""
    shown: list[SubmitRun] = []
    with asking(f"Submit {name}", 900) as dialog:
        with ui.element("div").classes("line"):
            site = ui.select(sites, value=sites[0], label="Site")
            nodes = ui.number("Nodes", value=1, min=1, precision=0)
            gpus = ui.number("GPUs a node", value=8, min=0, precision=0)
            image = ui.input("Image")
            mounts = ui.input("Mounts, WHAT:/WHERE")
        script = ui.label().classes("diff mono w-full")
        ui.button("Show the script", on_click=lambda: show()).props("outline")
        send = choose(dialog, "Submit")
        send.disable()
    for field in (site, nodes, gpus, image, mounts):
        field.on_value_change(lambda: send.disable())

    async def show() -> None:
        numbers = {"nodes": int(nodes.value or 0), "gpus": int(gpus.value or 0)}
        given: dict[str, Any] = {"site": site.value, "config": config, "name": name, **numbers}
        given |= {"image": image.value.strip(), "mounts": mounts.value.split(), "only_print": True}
        try:
            wish = SubmitRun(**given)
        except ValueError:
            ui.notify("give a name of letters, digits and -, 1 node or more, and 0 GPUs or more", type="negative")
            return
        said = await do(parts.actions.submit, person, wish)
        if said is not None:
            script.text, shown[:] = said.text, [wish.model_copy(update={"only_print": False})]
            send.enable()

    if await dialog:
        said = await do(parts.actions.submit, person, shown[0])
        if said is not None:
            ui.notify(f"{said.text or 'submitted'}. The run appears among the runs once it has started.", timeout=0)
