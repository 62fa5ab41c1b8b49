"""Puts a wrong value into words, with the nearest name that is known."""

import difflib
import json
from typing import Any

from torchtitan.config.names import key_names, sections
from torchtitan.config.schema import OTHERS, DataSource


def describe(problem: Any) -> str:
    name = _dotted(problem["loc"])
    if problem["type"] == "extra_forbidden":
        table = isinstance(problem["input"], dict)
        if name in OTHERS:
            reader = OTHERS[name].partition(".")[0]
            return f"[{name}] needs {reader}/ and titan_planner/ beside torchtitan/; add them, or remove the section"
        shown = f"[{name}]" if table else f"{name} = {as_json(problem['input'])}"
        return f"{shown}: unknown {'section' if table else 'key'}{_nearest(name, table)}"
    if problem["type"] in ("model_type", "model_attributes_type"):
        return f"{name} = {as_json(problem['input'])}: this is a section; write [{name}] and its keys below"
    message = problem["msg"]
    if name.startswith("model.converters[") and problem["input"] == "float8":
        message = "torchtitan v0.2.2's own 405B file says so, but v0.2.2 does not know this name either; write "
        message += '"quantize.linear.float8"'
    return f"{name} = {as_json(problem['input'])}: {message[0].lower()}{message[1:]}"


def _dotted(loc: tuple[int | str, ...]) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc).removeprefix(".")


def as_json(value: Any) -> str:
    return json.dumps(value, default=str)


def _nearest(name: str, section: bool) -> str:
    """`; did you mean X?`: the same key in another section, else the name that is spelt most alike."""
    place, _, leaf = name.rpartition(".")
    if section:
        return _did_you_mean(difflib.get_close_matches(name, sections(), n=1))
    known = key_names()
    if place.startswith("training.sources["):
        known = [f"{place}.{key}" for key in DataSource.model_fields]
    leaves = {key.rpartition(".")[2]: key for key in known}
    same = [key for key in known if key.rpartition(".")[2] == leaf]
    alike = [leaves[near] for near in difflib.get_close_matches(leaf, leaves, n=1)]
    return _did_you_mean(same or difflib.get_close_matches(name, known, n=1, cutoff=0.75) or alike)


def _did_you_mean(near: list[str]) -> str:
    """The end of a message about an unknown name, given the known names that are nearest to it."""
    return f"; did you mean {near[0]}?" if near else ""
