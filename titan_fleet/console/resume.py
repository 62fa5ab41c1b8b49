"""Whether a run may go on where it stopped, and with what. The nodes then start it in its folder, as it was started."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from titan_fleet.console.answers import StartRun
from titan_fleet.console.library import Entry
from titan_fleet.node.folders import PLAN
from torchtitan.config.load import check_text
from torchtitan.refusal import Refusal
from torchtitan.tools.runs import parse_config

_SET_AT_THE_START = {"job.dump_folder", "parallelism.pipeline_parallel_layer_counts"}


def plan_resume(parts: Sequence[Entry]) -> tuple[StartRun, str]:
    """The start of a run with these parts, in the order of their ranks, and the hash of the code that it ran."""
    head, run = parts[0], f"run = {parts[0].page.name}"
    if running := [part.page.node for part in parts if part.row.state == "running"]:
        raise Refusal(f"{run} still runs on {', '.join(running)}; stop it first")
    if all(part.row.state == "ended" for part in parts):
        raise Refusal(f"{run} did all its steps; clone it with more training.steps")
    if [part.row.rank for part in parts] != list(range(head.row.nodes or 1)):
        shown = ", ".join(part.page.node for part in parts)
        raise Refusal(f"{run} ran on {head.row.nodes} nodes, and only {shown} show it; connect the others")
    if not re.fullmatch("[0-9a-f]{40}([0-9a-f]{24})?", code := head.row.code or ""):
        raise Refusal(f"{run} ran {code[:40] or 'unknown code'}, which no console sent; resume it where it was started")
    texts = [_read(part, f"node/{part.row.rank}/job.toml") for part in parts]
    _need_same(run, texts, _read(head, "config.toml"))
    checkpoint = check_text(texts[0], head.page.name).checkpoint
    if not checkpoint.enable or checkpoint.load_step >= 0:
        key, value = ("load_step", str(checkpoint.load_step)) if checkpoint.enable else ("enable", "false")
        raise Refusal(f"{run} has checkpoint.{key} = {value}, so it would not go on from its end; clone it instead")
    if "://" not in checkpoint.folder:
        manifest = re.compile(re.escape(checkpoint.folder) + "/step-[0-9]+/manifest\\.json")
        if not any(manifest.fullmatch(row.path) for row in head.place.files()[0]):
            raise Refusal(f"{run} has no complete checkpoint to go on from; clone it instead")
    nodes, plan = [part.member.name for part in parts], _read(head, f"node/0/{PLAN}")
    return StartRun(config=texts[0], name=head.row.run, nodes=nodes, plan=plan), code


def _need_same(run: str, texts: Sequence[str], record: str) -> None:
    """What each node would start is what the run recorded when it began."""
    if not record:
        raise Refusal(f"{run} ended before it began to train; clone it instead")
    began, now = (_keys(text) for text in (record, texts[0]))
    changed = [key for key in now if key in began and now[key] != began[key] and key not in _SET_AT_THE_START]
    if changed or len(set(texts)) > 1:
        which = changed[0] if changed else "a key"
        raise Refusal(f"{run} began with another value of {which} than its node/*/job.toml has now; put it back")


def _keys(text: str) -> Mapping[str, Any]:
    try:
        return parse_config(text)
    except ValueError:
        return {}


def _read(part: Entry, path: str) -> str:
    try:
        return part.place.read(path, 0, 2**18)[0].decode("utf-8", errors="replace")
    except FileNotFoundError:
        return ""
