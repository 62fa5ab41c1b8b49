"""The verbs of `python -m torchtitan`: a table of their modules. A module is loaded when its verb is typed.

Each module has HELP (one line), add_arguments(parser) and run(args, options). What follows `--` on the command line are
the options; a verb that takes some says in its parser's epilog what they are.
"""

import argparse
import importlib
from collections.abc import Sequence
from types import ModuleType

VERBS = {
    "train and data": {
        "prepare": "data.prepared.prepare",
        "tokenizer train": "tools.text.tokenizer",
        "download": "tools.hub.download",
        "seed_checkpoint": "tools.seed_checkpoint",
    },
    "look and check": {
        "check": "tools.check",
        "dry_run": "tools.dry_run.verb",
        "runs": "tools.runs",
        "compare": "tools.compare.verb",
        "drill": "tools.drill.verb",
        "schema": "tools.schema",
    },
    "several machines": {
        "plan": "tools.plan.verb",
        "plan measured": "tools.plan.measured",
        "plan rows": "tools.plan.published.verb",
        "plan place": "tools.plan.places.verb",
        "probe": "tools.probe.verb",
        "netem": "tools.netem.verb",
        "node": "node.verb",
        "console": "console.verb",
        "console token": "console.token",
        "launch": "launch.submit.verb",
        "preflight": "launch.preflight.verb",
        "reach serve": "reach.serve",
        "reach join": "reach.join",
        "reach leave": "reach.leave",
    },
    "several sites": {
        "swarm try": "swarm.attempt",
        "swarm plan": "tools.sites.verb",
        "swarm keys": "swarm.keys",
        "swarm serve": "swarm.syncer.serve",
        "swarm status": "swarm.status",
        "swarm export": "swarm.syncer.export",
    },
    "after training": {
        "generate": "tools.text.generate",
        "eval": "tools.text.evaluate",
        "convert": "tools.hub.convert",
        "export": "tools.hub.export",
    },
}
MODULES = {verb: f"torchtitan.{module}" for group in VERBS.values() for verb, module in group.items()}


def find(argv: Sequence[str]) -> tuple[str, Sequence[str]]:
    """The verb that these words begin with, of two words or one, or "" if there is none; and the words behind it."""
    for length in (2, 1):
        if (verb := " ".join(argv[:length])) in MODULES:
            return verb, argv[length:]
    return "", argv


def load(verb: str) -> tuple[ModuleType, argparse.ArgumentParser]:
    module = importlib.import_module(MODULES[verb])
    parser = argparse.ArgumentParser(
        f"python -m torchtitan {verb}",
        description=module.__doc__,
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, width=110),  # examples keep their lines
    )
    module.add_arguments(parser)
    return module, parser


def listing() -> str:
    lines = ["usage: python -m torchtitan VERB ...", "VERB --help explains a verb; --version shows the version"]
    for group, verbs in VERBS.items():
        lines += ["", f"{group}:", *(f"  {verb:16} {load(verb)[0].HELP}" for verb in verbs)]
    return "\n".join(lines)


def page() -> str:
    """docs/verbs.md: what --help says of each verb."""
    about = "Written by `python -m torchtitan schema` from what `VERB --help` shows."
    lines = ["# Every verb of `python -m torchtitan`", "", about]
    for group, verbs in VERBS.items():
        lines += ["", f"## {group.capitalize()}"]
        for verb in verbs:
            module, parser = load(verb)
            lines += [
                "",
                f"### {verb}",
                "",
                f"{module.HELP[0].upper()}{module.HELP[1:]}.",
                "",
                "```text",
                parser.format_help().strip(),
                "```",
            ]
    return "\n".join(lines) + "\n"
