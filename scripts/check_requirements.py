"""Checks whether this Python has the packages of a requirements file: exit code 0 if so, 1 if not.

    python scripts/check_requirements.py requirements.txt --missing

A pin decides which version gets installed, not which one is needed: any version passes, unless pyproject.toml gives a
range for the package. The check takes a moment: it uses only the standard library and imports none of the packages.
"""

import argparse
import operator
import platform
import re
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

PYPROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"
HERE = {
    'sys_platform == "linux"': sys.platform == "linux",
    'platform_machine == "x86_64"': platform.machine() == "x86_64",
}
COMPARISONS = {">=": operator.ge, "<=": operator.le, "<": operator.lt, ">": operator.gt, "==": operator.eq}


def main() -> None:
    parser = argparse.ArgumentParser(description="Check whether this Python has the packages of a requirements file.")
    parser.add_argument("requirements", type=Path)
    parser.add_argument("--missing", action="store_true", help="print each missing package on a line")
    args = parser.parse_args()
    missing = list(find_missing(args.requirements, read_ranges(PYPROJECT.read_text(encoding="utf-8"))))
    if args.missing:
        for line in missing:
            print(line)
    raise SystemExit(1 if missing else 0)


def find_missing(requirements: Path, ranges: dict[str, str]) -> Iterator[str]:
    """One text for each requirement that this Python does not meet; Python's own version comes first."""
    python = ".".join(map(str, sys.version_info[:3]))
    if not is_within(python, ranges["python"]):
        yield f"python {ranges['python']} (this is {python})"
    for name in read_names(requirements):
        wanted = ranges.get(name, "")
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            yield f"{name} {wanted}".strip()
            continue
        if not is_within(version, wanted):
            yield f"{name} {wanted} (installed: {version})"


def read_names(requirements: Path) -> list[str]:
    """The packages that a requirements file and its included files list for this machine, each once."""
    names: dict[str, None] = {}
    for line in requirements.read_text(encoding="utf-8").splitlines():
        line = line.partition("#")[0].strip()
        if line.startswith("-r"):
            names.update(dict.fromkeys(read_names(requirements.parent / line[2:].strip())))
        elif line and all(is_here for marker, is_here in HERE.items() if marker in line):
            names[split_name(line)[0]] = None
    return list(names)


def read_ranges(pyproject: str) -> dict[str, str]:
    """The version range of Python and of each dependency. By regular expression: Python 3.10 has no TOML reader."""
    dependencies = re.findall(r"^(?:dependencies|fleet) = \[(.*?)^\]", pyproject, re.DOTALL | re.MULTILINE)
    python = re.search(r'^requires-python = "(.*)"', pyproject, re.MULTILINE)
    assert dependencies and python, "pyproject.toml has lost its dependencies or requires-python"
    return {"python": python[1], **dict(split_name(entry) for entry in re.findall(r'"(.*?)"', "".join(dependencies)))}


def split_name(requirement: str) -> tuple[str, str]:
    """`Tomli_W>=1.0` -> (`tomli-w`, `>=1.0`)."""
    name = re.match(r"[\w.-]+", requirement)
    assert name, f"not a requirement: {requirement}"
    return re.sub(r"[-_.]+", "-", name[0]).lower(), requirement[name.end() :].strip()


def is_within(version: str, wanted: str) -> bool:
    """Whether a version meets `>=2.11,<2.14`; only release numbers count, so a vendor's 2.11.0a0+nv counts as 2.11."""
    for clause in filter(None, wanted.split(",")):
        sign, bound = re.match(r"\s*([<>=]+)\s*(.*)", clause).groups()
        if not COMPARISONS[sign](release(version), release(bound)):
            return False
    return True


def release(version: str) -> tuple[int, ...]:
    """`2.11.0a0+nv` -> (2, 11). Trailing zeros are dropped, so that 2.11 equals 2.11.0."""
    numbers = [int(n) for n in re.match(r"\d+(\.\d+)*", version)[0].split(".")]
    while len(numbers) > 1 and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


if __name__ == "__main__":
    main()
