"""What the keys of a configuration mean, for a word that one looks up beside the editor."""

import json

from nicegui import ui

from torchtitan.config.names import sections

_SHOWN = 12


def meanings() -> dict[str, str]:
    """Each key by its dotted name: what it does, and its default."""
    found = {}
    for section, keys in sections().items():
        for key, field in keys.model_fields.items():
            default = json.dumps(field.get_default(call_default_factory=True), default=str)
            found[f"{section}.{key}"] = f"{' '.join((field.description or '').split())} Default: {default}"
    return found


def add_lookup() -> None:
    """A field for a part of a key's name or meaning, and the keys that have it."""
    wanted = ui.input("Look up a key").props("clearable maxlength=80").classes("w-full")
    holder = ui.element("div").classes("rows").style("margin-top: 8px")

    def show() -> None:
        word = str(wanted.value or "").strip().lower()
        known = meanings() if word else {}
        by_name = [name for name in known if word in name]
        by_meaning = [name for name in known if word in known[name].lower() and word not in name]
        holder.clear()
        with holder:
            for name in (by_name + by_meaning)[:_SHOWN]:
                with ui.element("div"):
                    ui.label(name).classes("mono")
                    ui.label(known[name]).classes("dim small")
            if word and not by_name + by_meaning:
                ui.label("No key has this word.").classes("dim")

    wanted.on_value_change(show)
