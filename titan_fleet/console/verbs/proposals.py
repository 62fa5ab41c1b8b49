"""Layouts that the planner proposes for a configuration on chosen nodes.

The planner runs in a process of its own. What it knows of the devices and links is a file of clusters/, of which only
the number of nodes and of devices is replaced; `rests_on` says so.
"""

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

import tomli
import tomli_w

from titan_fleet.console.answers import Proposal
from titan_fleet.console.nodes import Member
from titan_fleet.console.text import inert
from titan_fleet.console.verbs.call import call
from torchtitan.refusal import Refusal
from torchtitan.root import ROOT

_SECONDS, _SHOWN = 120, 5
_DRAWING_BYTES = 2**19  # a larger one would slow a page down


def data_sheets() -> list[str]:
    """The names of the files that describe machines."""
    return sorted(file.stem for file in (ROOT / "clusters").glob("*.toml"))


def propose(home: Path, text: str, sheet: str, members: Sequence[Member]) -> list[Proposal]:
    """The fastest layouts first; each has the whole configuration to train with."""
    if sheet not in data_sheets():
        raise Refusal(f"machines = {sheet[:80]!a} is no file of clusters/; use one of {', '.join(data_sheets())}")
    counts = {_devices(member) for member in members}
    if len(counts) > 1:
        names = ", ".join(f"{member.name} {_devices(member)}" for member in members)
        raise Refusal(f"the nodes have unlike numbers of devices ({names}); set gpus = ... alike in the file of nodes")
    with tempfile.TemporaryDirectory(dir=home) as folder:
        run, cluster, out = (Path(folder) / name for name in ("train.toml", "cluster.toml", "each"))
        run.write_text(text, encoding="utf-8")
        known = tomli.loads((ROOT / f"clusters/{sheet}.toml").read_text(encoding="utf-8"))
        known["nodes"] = {"count": len(members), "devices": counts.pop()}
        known["name"] = f"{len(members)} x {known['nodes']['devices']} {known['device']['name']}"
        cluster.write_text(tomli_w.dumps(known), encoding="utf-8")
        words = ["plan", str(run), "--cluster", str(cluster), "--show", str(_SHOWN), "--each", str(out)]
        done = call(words, _SECONDS, "use it in a terminal")
        if done.returncode:
            raise Refusal(
                inert(done.stderr[-2000:]).replace(f"{run}: ", "").removeprefix("error: ").strip()
                or "the planner fails"
            )
        files = sorted(out.glob("*.toml"), key=lambda file: int(file.stem)) if out.is_dir() else []
        return [_proposal(file) for file in files]


def _devices(member: Member) -> int:
    """As many as ranks would start there."""
    found = len(member.report.devices) if member.report and member.host.gpus is None else member.host.gpus
    return max(1, found or 0)


def _proposal(file: Path) -> Proposal:
    plan, drawing = file.with_suffix(".json").read_text(encoding="utf-8"), file.with_suffix(".svg")
    said = json.loads(plan)
    is_drawn = drawing.is_file() and drawing.stat().st_size <= _DRAWING_BYTES
    config = tomli.loads(file.read_text(encoding="utf-8"))
    config["job"].pop("plan", None)  # the start sends it
    return Proposal(
        layout=said["layout"],
        seconds=said["seconds"],
        memory_gib=said["memory_gib"],
        rests_on=said["rests_on"],
        config=tomli_w.dumps(config),
        plan=plan,
        drawing=drawing.read_text(encoding="utf-8") if is_drawn else "",
    )
