"""The verbs of `python -m torchtitan`: a table of their modules. A module is loaded when its verb is typed.

The planner and the fleet have such a table of their own, which is read where their folder is beside this package.

Each module has HELP (one line), add_arguments(parser) and run(args, options). What follows `--` on the command line are
the options; a verb that takes some says in its parser's epilog what they are.
"""

import argparse
import importlib
import re
from collections.abc import Sequence
from types import ModuleType

from torchtitan.root import PACKAGES

OWN = {
    "train and data": {
        "data": "torchtitan.tools.text.examples",
        "prepare": "torchtitan.data.prepared.prepare",
        "tokenizer train": "torchtitan.tools.text.tokenizer",
        "download": "torchtitan.tools.hub.download",
        "seed_checkpoint": "torchtitan.tools.seed_checkpoint",
    },
    "look and check": {
        "check": "torchtitan.tools.check",
        "dry_run": "torchtitan.tools.dry_run.verb",
        "runs": "torchtitan.tools.runs",
        "compare": "torchtitan.tools.compare.verb",
        "schema": "torchtitan.tools.schema",
    },
    "after training": {
        "generate": "torchtitan.tools.text.generate",
        "eval": "torchtitan.tools.text.evaluate",
        "convert": "torchtitan.tools.hub.convert",
        "export": "torchtitan.tools.hub.export",
    },
    "several machines": {"preflight": "torchtitan.launch.preflight.verb"},
}


def _with_those_of_others() -> dict[str, dict[str, str]]:
    groups = {group: dict(verbs) for group, verbs in OWN.items()}
    for package in PACKAGES[1:]:
        for group, verbs in importlib.import_module(f"{package.name}.verbs").VERBS.items():
            groups[group] = groups.get(group, {}) | verbs
    return groups


VERBS = _with_those_of_others()
MODULES = {verb: module for group in VERBS.values() for verb, module in group.items()}


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
    """docs/verbs.md: each verb with what it needs."""
    about = "Written by `python -m torchtitan schema`. `VERB --help` explains a verb and its options."
    lines = ["# Every verb of `python -m torchtitan`", "", about]
    for group, verbs in VERBS.items():
        lines += ["", f"## {group.capitalize()}", "", "| verb | what it does |", "| --- | --- |"]
        lines += ["| [`./run_llama_train.sh`](recipe/configuration.md) | train a model |"] if "prepare" in verbs else []
        lines += [f"| `{_usage(verb)}` | {load(verb)[0].HELP} |" for verb in verbs]
    return "\n".join(lines) + "\n"


def _usage(verb: str) -> str:
    """The verb with what it cannot do without."""
    usage = " ".join(load(verb)[1].format_usage().removeprefix("usage: python -m torchtitan ").split())
    needed = re.sub(r" \[-[^\[\]]*(\[[^\]]*\])?\]", "", usage)
    return needed.replace("|", "\\|")
