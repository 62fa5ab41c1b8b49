"""Prints --help: the sections of the configuration, or the keys of some of them with the values of the file."""

import json
import os
import sys
import textwrap
import types
from collections.abc import Sequence
from typing import Any, Literal, Union, get_args, get_origin

from torchtitan.config.names import sections
from torchtitan.config.schema import Config

WORDS = {"--help", "-h"}
_WIDTH = 100
_EXAMPLES = """\
  {run} --training.steps 20                       shorter
  {run} --training.dataset_path book.txt          your own text
  {run} --model.n_layers 2 --model.dim 128        another shape
  {run} --model.name my_model.py:SPEC             a model of your own
  {run} --compile.enable                          faster steps after a slow first one
  {run} --checkpoint.enable                       resumes when it is started again
  {run} --parallelism.tensor_parallel_degree 2    on two devices (NGPU=2)
  {run} --optimizer.name Muon --optimizer.lr 3e-3
  {run} --job.dump_folder outputs/second          a folder for each run
  {run} --help training                           the keys of one section; --help all: of all\
"""


def print_help(argv: Sequence[str], config: Config, prog: str) -> None:
    """`config` has the values of the file, which the options override."""
    try:
        print(_text(argv, config, prog), flush=True)
    except BrokenPipeError:  # `| head` has seen enough; Python flushes stdout once more at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _text(argv: Sequence[str], config: Config, prog: str) -> str:
    place = next(i for i, word in enumerate(argv) if word in WORDS)
    asked = argv[place + 1] if place + 1 < len(argv) and not argv[place + 1].startswith("-") else ""
    known = sections()
    if asked:
        chosen = [name for name in known if asked == "all" or f"{name}.".startswith(f"{asked}.")]
        if not chosen:
            raise SystemExit(f"--help {asked}: no such section; use all, or one of {', '.join(known)}")
        return "\n\n".join(_section(name, config) for name in chosen)
    lines = [
        f"usage: {prog} [--job.config_file FILE.toml] [--SECTION.KEY VALUE ...]\n",
        "Train a language model. Every key of the TOML file is an option here and overrides the file.\n",
        _EXAMPLES.format(run=prog if prog != "train.py" else "./run_llama_train.sh"),
        "\nSections:",
    ]
    for name, section in known.items():
        about = str(section.__doc__).partition(". ")[0].partition(": ")[0].partition(", if")[0].rstrip(".")
        lines.append(f"  {name:<24}{about} ({len(section.model_fields)} keys)")
    return "\n".join(lines)


def _section(name: str, config: Config) -> str:
    values: Any = config
    for part in name.split("."):
        values = getattr(values, part)
    lines = [f"[{name}] {type(values).__doc__}"]
    for key, field in type(values).model_fields.items():
        value = getattr(values, key)
        default = "None" if value is None else json.dumps(value, default=str)
        lines.append(f"\n  --{name}.{key} {_kind(field.annotation)}".rstrip() + f"  (default: {default})")
        lines += textwrap.wrap(str(field.description), _WIDTH, initial_indent="      ", subsequent_indent="      ")
    return "\n".join(lines)


def _kind(annotation: Any) -> str:
    """What may follow an option."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        return _kind(next(kind for kind in args if kind is not type(None)))
    if origin is Literal:
        return "|".join(map(str, args))
    if origin is list:
        return f"{_kind(args[0])},..." if args[0] in (int, str) or get_origin(args[0]) is Literal else "(in the file)"
    if args:  # Annotated
        return _kind(args[0])
    return {bool: "", int: "N", float: "X", str: "TEXT"}.get(annotation, "(in the file)")
