"""Command line over TOML over defaults, into one frozen Config; every mistake of both is listed at once."""

import copy
import dataclasses
import functools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, get_args

import tomli
import tomli_w
import tyro
from pydantic import ValidationError

from torchtitan.config.names import flat, key_names, sections
from torchtitan.config.rules import find_conflicts
from torchtitan.config.schema import Config, Section, Whole
from torchtitan.config.section import OtherSection
from torchtitan.config.spelling import spelled_out
from torchtitan.refusal import Refusal

_MOST_LEVELS = 20  # of tables and lists in a file
_TOO_DEEP = f"its tables have more than {_MOST_LEVELS} levels; write fewer"
_TOO_LARGE = "one of its integers has more than 64 bits; write a smaller one"
IN_THE_FILE_ONLY = {"sources", "module_fqns_per_model_part", "rope_scaling"}  # too deep for a command line


class ConfigError(Refusal):
    """All mistakes of one configuration."""

    def __init__(self, origin: str, mistakes: Sequence[str]) -> None:
        self.mistakes = list(mistakes)
        count = f"{len(mistakes)} mistake{'s' if len(mistakes) > 1 else ''}"
        super().__init__("\n".join([f"{origin}: {count}", *(f"  {mistake}" for mistake in mistakes)]))


def load_config(argv: Sequence[str], world_size: int | None = None, prog: str = "train.py", rank: int = 0) -> Config:
    """The configuration a command line asks for; raises ConfigError, and leaves by SystemExit for --help."""
    if broken := [word for word in argv if not word.isascii() and "\\udc" in ascii(word)]:  # as Python reads such bytes
        raise ConfigError("command line", [f"{broken[0]!a} is not UTF-8; write it in UTF-8"])
    options, others = _take_out_unknown(spelled_out(argv))
    path = _config_file(options)
    data, refused = _in_todays_keys(_read_toml(Path(path)) if path else {}, quiet=rank != 0)
    others, also_refused = _in_todays_keys(others, quiet=rank != 0)
    if {"--help", "-h"} & set(options):
        from torchtitan.config.help import print_help

        if rank == 0:
            print_help(options, _validate(data)[0], prog)
        raise SystemExit(0)
    # tyro needs defaults of the right type: the file's where they are right.
    given = _merge(others, _parse(options, _validate(data)[0], prog, quiet=rank != 0))
    values = _merge(data, given)
    if path:
        _look_beside(Path(path).parent, values.get("model"))
    if not any(word.startswith("--lr_scheduler.total_steps") for word in options):
        _keep_schedule(values, data.get("training"), given.get("training", {}))
    return check(values, path or "command line", world_size, refused + also_refused)


def _look_beside(folder: Path, model: Any) -> None:
    """A model of one's own is looked for beside the TOML first, so that both can lie anywhere."""
    place, _, spec = str(model.get("name")).rpartition(":") if isinstance(model, dict) else ("", "", "")
    file = folder / (place if place.endswith(".py") else place.replace(".", "/") + ".py")
    if place and file.is_file():
        model["name"] = f"{file}:{spec}"


def _keep_schedule(values: dict[str, Any], file: Any, given: dict[str, Any]) -> None:
    """Fewer steps on the command line than in the file end the run early on the schedule of the file."""
    long, short = file.get("steps") if isinstance(file, dict) else None, given.get("steps")
    schedule = values.setdefault("lr_scheduler", {})
    if type(long) is type(short) is int and short < long and isinstance(schedule, dict):
        schedule.setdefault("total_steps", long)


def check(data: dict[str, Any], origin: str, world_size: int | None = None, refused: Sequence[str] = ()) -> Config:
    """The configuration that tables of values make, or all that is wrong with them."""
    config, wrong, broken = _validate(data)
    mistakes = [*refused, *wrong]
    for keys, message in find_conflicts(config, world_size):
        if not broken.intersection(keys):  # what rests on a refused value is not known to be wrong
            mistakes.append(message)
    if mistakes:
        raise ConfigError(origin, mistakes)
    return config


def to_toml(config: Config) -> str:
    """The configuration as a TOML file that loads to the same; None is TOML's absent key."""
    left_out: dict[str, Any] = {"job": {"config_file"}}
    for name, section in config:  # one that asks for nothing need not be known where the file is read
        if isinstance(section, OtherSection) and section == type(section)():
            left_out[name] = True
    return tomli_w.dumps(config.model_dump(exclude_none=True, exclude=left_out))


def with_seed(config: Config, seed: int) -> Config:
    """The configuration that repeats a run: with the seed that the run drew."""
    return config.model_copy(update={"debug": config.debug.model_copy(update={"seed": seed})})


def _merge(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Key by key, `above` wins; a value in the place of a table stays, for it is to be refused."""
    merged = dict(below)
    for name, value in above.items():
        if not isinstance(value, dict):
            merged[name] = value
        elif isinstance(table := below.get(name, {}), dict):
            merged[name] = _merge(table, value)
    return merged


def check_text(text: str, origin: str, world_size: int | None = None) -> Config:
    """The configuration that the text of a TOML file makes; raises ConfigError with all mistakes. No file is read."""
    data, refused = _in_todays_keys(_parse_toml(text, origin), quiet=True)
    return check(data, origin, world_size, refused)


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(str(path), [f"cannot be read: {getattr(error, 'strerror', None) or error}"]) from None
    return _parse_toml(text, str(path))


def _parse_toml(text: str, origin: str) -> dict[str, Any]:
    try:
        data = tomli.loads(text)
        mistake = _odd(data)
    except tomli.TOMLDecodeError as error:
        mistake = f"is not TOML: {error}"
    except RecursionError:
        mistake = _TOO_DEEP
    except ValueError:  # an integer of more digits than Python reads
        mistake = _TOO_LARGE
    if mistake:
        raise ConfigError(origin, [mistake])
    if isinstance(job := data.get("job"), dict) and "config_file" in job:
        raise ConfigError(origin, ["job.config_file is for the command line; a file cannot name another: remove it"])
    return data


def _odd(value: Any, level: int = 0) -> str:
    """What TOML forbids and tomli reads, or what the name of no file can hold."""
    if isinstance(value, (dict, list)):
        if level > _MOST_LEVELS:
            return _TOO_DEEP
        below = value.values() if isinstance(value, dict) else value
        return next((found for one in below if (found := _odd(one, level + 1))), "")
    if type(value) is int and not -(2**63) <= value < 2**63:
        return _TOO_LARGE
    return f"{value[:80]!a} holds a zero byte; leave it out" if isinstance(value, str) and "\0" in value else ""


def _validate(data: dict[str, Any]) -> tuple[Config, list[str], set[str]]:
    """The configuration without its wrong values, what is wrong with them, and their names."""
    data = copy.deepcopy(data)
    try:
        return Whole.model_validate(data), [], set()
    except ValidationError as error:
        problems = error.errors()
    names = [_key_of(problem["loc"]) for problem in problems]
    for *path, key in names:  # a wrong key is taken out whole, so that the rest can still be checked
        table = functools.reduce(lambda table, part: table.get(part, {}), path, data)
        table.pop(key, None)
    from torchtitan.config.mistakes import describe

    broken = {".".join(name) for name in names}
    return Whole.model_validate(data), [describe(problem) for problem in problems], broken


def _key_of(loc: tuple[int | str, ...]) -> list[str]:
    """Section and key that a problem lies in, or as much of them as there is."""
    parts = [str(part) for part in loc]
    for end in range(1, len(parts)):
        if ".".join(parts[:end]) in sections():
            return parts[: end + 1]
    return parts


def _config_file(argv: Sequence[str]) -> str | None:
    """The file has to be read before the command line, whose defaults it provides; as everywhere, the last one wins."""
    path = None
    for i, arg in enumerate(argv):
        name, equals, value = arg.partition("=")
        if name.replace("-", "_") == "__job.config_file":
            path = value if equals else "".join(argv[i + 1 : i + 2])
            if not path or path.startswith("--"):
                raise ConfigError("command line", [f"--job.config_file is followed by {path!r}; it needs a file name"])
    return path


def _in_todays_keys(data: dict[str, Any], quiet: bool) -> tuple[dict[str, Any], list[str]]:
    """The tables without torchtitan's other names for keys, and what is refused of those."""
    if set(flat(data)) <= set(key_names()):
        return data, []
    from torchtitan.config import torchtitan_keys

    reading = torchtitan_keys.read(data)
    if not quiet:
        print("\n".join(reading.warnings), file=sys.stderr, end="\n" if reading.warnings else "")
    return reading.values, reading.refusals


def _take_out_unknown(argv: list[str]) -> tuple[list[str], dict[str, Any]]:
    """Options of torchtitan's that the parser would not know, apart from the rest."""
    known = {f"--{name}" for name in key_names()}
    if all(word.partition("=")[0] in known for word in argv if word.startswith("--")):
        return argv, {}
    from torchtitan.config import torchtitan_keys

    return torchtitan_keys.take_options(argv)


def _parse(argv: Sequence[str], defaults: Config, prog: str, quiet: bool) -> dict[str, Any]:
    """The values that the command line sets. tyro checks their types, and the schema checks their values."""
    parsed: Any = tyro.cli(
        _options(defaults), args=list(argv), prog=prog, use_underscores=True, console_outputs=not quiet
    )
    return _changed(dataclasses.asdict(parsed), defaults)


def _options(section: Section) -> Any:
    """A dataclass like the section, with its values as defaults, for tyro to fill."""
    fields: list[tuple[str, Any, Any]] = []
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if name in IN_THE_FILE_ONLY:
            continue
        if isinstance(value, Section):
            options = _options(value)
            # With its help given, tyro does not parse source files to find one, a quarter of the start.
            kind: Any = Annotated[options, tyro.conf.arg(help=type(value).__doc__)]
            fields.append((name, kind, dataclasses.field(default_factory=options)))
        else:
            # Of words or None tyro would list None as one more word; of any text, the schema lists the words alone.
            of_words = "Literal" in str(field.annotation) and type(None) in get_args(field.annotation)
            kind = Annotated[str | None if of_words else field.annotation, tyro.conf.arg(help=field.description)]
            fields.append((name, kind, dataclasses.field(default_factory=functools.partial(copy.copy, value))))
    options = dataclasses.make_dataclass(type(section).__name__, fields)
    options.__doc__ = type(section).__doc__
    return options


def _changed(values: dict[str, Any], defaults: Section) -> dict[str, Any]:
    """The values that differ from the defaults, as nested tables. A section without such a value is left out."""
    changed = {}
    for name, value in values.items():
        default = getattr(defaults, name)
        if isinstance(default, Section):
            value = _changed(value, default)
            if value:
                changed[name] = value
        elif value != default:
            changed[name] = value
    return changed
