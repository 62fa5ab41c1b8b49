"""Finds what would stop a run, without torch: mistakes of the configuration, and what is not on this machine."""

import argparse
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from torchtitan.config.schema import Config
from torchtitan.data.texts.sources import named_texts, require_text
from torchtitan.data.tokenizers.files import find_file
from torchtitan.models.describe import describe_configured
from torchtitan.models.families import load_run_or_exit
from torchtitan.refusal import Refusal

HELP = "find what would stop a run on this machine, without torch"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "file", metavar="FILE.toml", nargs="?", help="the configuration (default: --job.config_file after --)"
    )
    parser.add_argument(
        "--world_size", type=int, help="ranks the run will have; without it, what depends on them is not checked"
    )
    parser.epilog = "After --: options of train.py."


def run(args: argparse.Namespace, options: Sequence[str]) -> None:
    file = ["--job.config_file", args.file] if args.file else []
    config, blueprint = load_run_or_exit([*file, *options], args.world_size, rank=0)
    origin = config.job.config_file or "command line"
    if missing := what_is_missing(config):
        raise Refusal("\n  ".join([f"{origin} has no mistake, but this machine lacks what it names:", *missing]))
    print(f"{origin}: {describe_configured(blueprint, config)}: no mistake")


def what_is_missing(config: Config, writes: bool = True) -> list[str]:
    """What a run would refuse at its start on this machine, and where rank 0 is (`writes`) in the run folder."""
    found = []
    for look in _looks(config, writes):
        try:
            look()
        except Refusal as error:
            found.append(str(error))
    return found


def _looks(config: Config, writes: bool) -> Iterator[Callable[[], object]]:
    yield partial(find_file, Path(config.model.hf_assets_path))
    for name, section in named_texts(config):
        yield partial(require_text, name, section)
    if writes:
        yield partial(_can_be_written, Path(config.job.dump_folder))


def _can_be_written(folder: Path) -> None:
    """Nothing is made: the nearest folder that exists decides."""
    try:
        there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        why = "" if there.is_dir() else f"{there} is a file"
        why = why or ("" if os.access(there, os.W_OK | os.X_OK) else "its permissions forbid it")
    except OSError as error:  # a folder above it that may not be searched
        why = error.strerror or str(error)
    if why:
        raise Refusal(f"job.dump_folder = {str(folder)!r} cannot be written: {why}; choose another folder")
