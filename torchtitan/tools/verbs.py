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


TRAIN = """### train

Train: `./run_llama_train.sh`, or `torchtitan-recipe train` where pip installed the recipe.

```text
usage: CONFIG_FILE=FILE.toml NGPU=8 ./run_llama_train.sh [options of train.py]

Checks the configuration, then starts train.py once for each GPU of this machine, or NGPU times.

    ./run_llama_train.sh --help              the sections of the configuration, and examples
    ./run_llama_train.sh --help training     the keys of one section
    PRINT_ONLY=1 ./run_llama_train.sh        prints the command and starts nothing
```"""


def page() -> str:
    """docs/verbs.md: an index, and what --help says of each verb."""
    about = "Written by `python -m torchtitan schema` from what `VERB --help` shows."
    lines = ["# Every verb of `python -m torchtitan`", "", about, "", "| verb | what it does |", "| --- | --- |"]
    lines += ["| [train](#train) | train a model |"]
    for verb, module in MODULES.items():
        lines += [f"| [{verb}](#{verb.replace(' ', '-')}) | {importlib.import_module(module).HELP} |"]
    for group, verbs in VERBS.items():
        lines += ["", f"## {group.capitalize()}"]
        lines += ["", TRAIN] if "prepare" in verbs else []
        for verb in verbs:
            usage, _, rest = load(verb)[1].format_help().replace(" [-h]", "").partition("\n\n")
            needed = re.sub(r" \[-[^\[\]]*(\[[^\]]*\])?\]", "", " ".join(usage.split()))  # without what may be left out
            needed += " [options]" if " [-" in usage else ""
            rest = re.sub(r"^  -h, --help .*\n", "", rest, flags=re.MULTILINE).replace("options:\n\n", "")
            lines += ["", f"### {verb}", "", "```text", f"{needed}\n\n{rest.removesuffix('options:').strip()}", "```"]
    return "\n".join(lines) + "\n"
