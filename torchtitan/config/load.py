"""Command line over TOML over defaults, into one frozen Config; every mistake is listed at once."""

import difflib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import tomli
import tomli_w
import tyro
from pydantic import ValidationError

from torchtitan.config import not_yet
from torchtitan.config.rules import find_conflicts
from torchtitan.config.schema import Config, Section


class ConfigError(ValueError):
    """All mistakes of one configuration."""

    def __init__(self, origin: str, mistakes: Sequence[str]) -> None:
        self.mistakes = list(mistakes)
        count = f"{len(mistakes)} mistake{'s' if len(mistakes) > 1 else ''}"
        super().__init__("\n".join([f"{origin}: {count}", *(f"  {mistake}" for mistake in mistakes)]))


def load_config(argv: Sequence[str], world_size: int | None = None, prog: str = "train.py") -> Config:
    """The configuration a command line asks for; raises ConfigError, and leaves by SystemExit for --help."""
    path = _config_file(argv)
    config, mistakes, broken = read_toml(Path(path)) if path else (Config(), [], set())
    overridden = _parse_command_line(argv, config, prog)
    for keys, message in find_conflicts(overridden, world_size):
        if not broken.intersection(keys):  # what rests on a refused value is not known to be wrong
            mistakes.append(message)
    if mistakes:
        raise ConfigError(path or "command line", mistakes)
    return overridden


def load_config_or_exit(argv: Sequence[str], world_size: int | None, rank: int, prog: str = "train.py") -> Config:
    """load_config for a program: the mistakes are shown by rank 0 alone, and the exit code is 2."""
    try:
        return load_config(argv, world_size, prog)
    except ConfigError as error:
        _exit(str(error) if rank == 0 else "")


def read_toml(path: Path) -> tuple[Config, list[str], set[str]]:
    """A file's configuration without its wrong values, what is wrong with them, and their names."""
    try:
        data = tomli.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(str(path), [f"cannot be read: {getattr(error, 'strerror', None) or error}"]) from None
    except tomli.TOMLDecodeError as error:
        raise ConfigError(str(path), [f"is not TOML: {error}"]) from None
    data, mistakes = not_yet.take_out(data)
    broken: set[str] = set()
    try:
        return Config.model_validate(data), mistakes, broken
    except ValidationError as error:
        for problem in error.errors():
            mistakes.append(_describe(problem))
            _remove(data, problem["loc"])
            broken.add(".".join(str(part) for part in problem["loc"][:2]))
    return Config.model_validate(data), mistakes, broken


def to_toml(config: Config) -> str:
    """The configuration as a TOML file that loads to the same; None is TOML's absent key."""
    return tomli_w.dumps(config.model_dump(exclude_none=True))


def key_names() -> list[str]:
    """All keys of the schema, dotted."""
    return [f"{section}.{key}" for section, keys in sections().items() for key in keys.model_fields]


def sections() -> dict[str, type[Section]]:
    """The sections of the schema, in order."""
    return {name: type(default) for name, default in Config()}


def _exit(message: str) -> NoReturn:
    if message:
        print(message, file=sys.stderr)
    raise SystemExit(2)


def _config_file(argv: Sequence[str]) -> str | None:
    """The file has to be read before the command line, whose defaults it provides."""
    for i, arg in enumerate(argv):
        name, _, value = arg.partition("=")
        if name.replace("-", "_") == "__job.config_file":
            if not value and i + 1 == len(argv):
                raise ConfigError("command line", ["--job.config_file needs a file name"])
            return value or argv[i + 1]
    return None


def _parse_command_line(argv: Sequence[str], defaults: Config, prog: str) -> Config:
    for arg in argv:  # tyro would call these unknown; they are known to users of torchtitan
        name = arg.partition("=")[0].removeprefix("--").replace("-", "_")
        if arg.startswith("--") and name in not_yet.names():
            raise ConfigError(
                "command line", [f"--{name}: torchtitan v0.2.2 has this key, this version does not yet; remove it"]
            )
    return tyro.cli(Config, default=defaults, args=list(argv), prog=prog, description=_HELP, use_underscores=True)


_HELP = "Train a Llama. Every key of the TOML file is an option here and overrides it."


def _describe(problem: Any) -> str:
    name = _dotted(problem["loc"])
    if problem["type"] == "extra_forbidden":
        table = isinstance(problem["input"], dict)
        shown = f"[{name}]" if table else f"{name} = {_shown(problem['input'])}"
        return f"{shown}: unknown {'section' if table else 'key'}{_nearest(name, table)}"
    if problem["type"] in ("model_type", "model_attributes_type"):
        return f"{name} = {_shown(problem['input'])}: this is a section; write [{name}] and its keys below"
    message = problem["msg"]
    return f"{name} = {_shown(problem['input'])}: {message[0].lower()}{message[1:]}"


def _dotted(loc: tuple[int | str, ...]) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc).removeprefix(".")


def _shown(value: Any) -> str:
    return json.dumps(value, default=str)


def _nearest(name: str, section: bool) -> str:
    """`; did you mean X?`: the same key in another section, else the name that is spelt most alike."""
    if section:
        close = difflib.get_close_matches(name, Config.model_fields, n=1)
    else:
        known = key_names()
        leaf = name.rpartition(".")[2]
        close = [key for key in known if key.rpartition(".")[2] == leaf]
        close = close or difflib.get_close_matches(name, known, n=1, cutoff=0.75)
        close = close or [
            key
            for key in known
            if key.rpartition(".")[2] in difflib.get_close_matches(leaf, [k.rpartition(".")[2] for k in known], n=1)
        ]
    return f"; did you mean {close[0]}?" if close else ""


def _remove(data: dict[str, Any], loc: tuple[int | str, ...]) -> None:
    """Take a wrong key out whole, so that the rest can still be checked."""
    section = data.get(str(loc[0]))
    if len(loc) > 1 and isinstance(section, dict):
        section.pop(loc[1], None)
    else:
        data.pop(str(loc[0]), None)
