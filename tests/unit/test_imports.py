"""Who may import whom: the rules of docs/architecture.md, read off the source without running it.

A level may import the levels below it, so that a launcher reads a config without torch, the model can be lifted out
and used alone, and no mechanism knows which model it is applied to.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted([*ROOT.glob("torchtitan/**/*.py"), *ROOT.glob("benchmarks/**/*.py"), ROOT / "train.py"])
MODULES = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in SOURCES}

LEVEL_1 = ("torchtitan.refusal", "torchtitan.config", "torchtitan.hardware", "torchtitan.models.llama.args",)
PURE_TRAINING = ("torchtitan.training.loss", "torchtitan.training.optimizer", "torchtitan.training.lr_schedule")
ROOMS = ("torchtitan.parallel", "torchtitan.data", "torchtitan.checkpoint", "torchtitan.observe")
LAUNCH = ("torchtitan.launch", "torchtitan.preflight")
LLAMA = "torchtitan.models.llama"
TOP = ("torchtitan.verbs", "torchtitan.planner", "torchtitan.__main__", "benchmarks", "train")

# What may stand at the head of a file. Anything else is heavy or optional: imported by the one function that needs it.
LIGHT = {"pydantic", "pydantic_core", "tyro", "tomli", "tomli_w"}
ALWAYS_THERE = LIGHT | {"torch", "numpy", "rich", "fsspec"}


@dataclass(frozen=True)
class Import:
    module: str
    line: int
    at_load: bool  # runs when the file is imported: outside functions and `if TYPE_CHECKING`

    @property
    def package(self) -> str:
        return self.module.partition(".")[0]


def imports_of(source: str, modules: set[str] = MODULES) -> list[Import]:
    return list(walk_imports(ast.parse(source), at_load=True, modules=modules))


def walk_imports(node: ast.AST, at_load: bool, modules: set[str]) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (Import(alias.name, child.lineno, at_load) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            origin = "." * child.level + (child.module or "")
            for alias in child.names:  # `from torchtitan.observe import log` is about torchtitan.observe.log
                inner = f"{origin}.{alias.name}"
                yield Import(inner if inner in modules else origin, child.lineno, at_load)
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            yield from walk_imports(child, False, modules)
        else:
            function = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            yield from walk_imports(child, at_load and not function, modules)


def within(module: str, rooms: tuple[str, ...]) -> bool:
    return any(module == room or module.startswith(room + ".") for room in rooms)


def allowed_rooms(module: str) -> tuple[str, ...] | None:
    """The parts of torchtitan a module may import; None: it belongs nowhere yet."""
    loggable = (*LEVEL_1, "torchtitan.observe.log")
    if within(module, LEVEL_1):
        return LEVEL_1
    if within(module, LAUNCH):
        return (*LEVEL_1, *LAUNCH)
    for room in ROOMS:
        if within(module, (room,)):
            return (*loggable, room)
    if module in PURE_TRAINING:
        return loggable
    if module in (f"{LLAMA}.model", f"{LLAMA}.hf"):
        return ("torchtitan.refusal", f"{LLAMA}.args")
    if module == f"{LLAMA}.parallelize":
        return (*loggable, "torchtitan.parallel", LLAMA)
    if within(module, ("torchtitan.training",)):
        return (*LEVEL_1, *ROOMS, LLAMA, "torchtitan.training")
    if within(module, TOP):
        return ("torchtitan",)
    return None


def broken_rules(module: str, source: str) -> list[str]:
    rooms = allowed_rooms(module)
    if rooms is None:
        return [f"{module} is in none of the rooms of docs/architecture.md; give it one there and in allowed_rooms"]
    without_torch = within(module, (*LEVEL_1, *LAUNCH))
    alone = module in (f"{LLAMA}.model", f"{LLAMA}.hf")
    outside = {"torch"} if alone else LIGHT if without_torch else ALWAYS_THERE
    broken = []
    for found in imports_of(source):
        if found.module.startswith("."):
            rule = "imports are absolute"
        elif found.package == "train":
            rule = "nothing imports train.py"
        elif found.package in ("torchtitan", "benchmarks"):
            own = found.package == "benchmarks" == module.partition(".")[0]
            rule = "" if own or within(found.module, rooms) else f"it may import {', '.join(rooms)}"
        elif found.package in sys.stdlib_module_names or found.package in outside:
            rule = ""
        elif alone:
            rule = "it may import torch and the model's args, so that it can be used alone"
        elif without_torch and found.package == "torch":
            rule = "a config is read without torch" if found.at_load or module != "torchtitan.hardware" else ""
        else:
            rule = f"{found.package} is imported inside the function that needs it" if found.at_load else ""
        if rule:
            broken.append(f"{module}:{found.line} imports {found.module}: {rule}")
    return broken


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


CODE = [path for path in SOURCES if path.name != "__init__.py"]


@pytest.mark.parametrize("path", CODE, ids=module_of)
def test_a_file_imports_only_what_lies_below_it(path):
    assert not broken_rules(module_of(path), path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", [path for path in SOURCES if path.name == "__init__.py"], ids=module_of)
def test_an_init_file_is_empty_or_only_passes_names_on(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in tree.body[1:] if ast.get_docstring(tree) else tree.body:
        names_all = isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
        assert isinstance(node, (ast.Import, ast.ImportFrom)) or names_all, f"line {node.lineno} does work at import"


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("torchtitan.config.load", "import torch"),
        ("torchtitan.config.load", "def f():\n    import torch"),
        ("torchtitan.config.load", "from torchtitan.observe import log"),
        ("torchtitan.hardware", "import torch.distributed"),
        ("torchtitan.launch.node", "def f():\n    import torch"),
        ("torchtitan.launch.node", "from torchtitan.observe.log import logger"),
        ("torchtitan.models.llama.args", "from torch import nn"),
        ("torchtitan.models.llama.model", "from torchtitan.parallel.mesh import Mesh"),
        ("torchtitan.models.llama.model", "import numpy"),
        ("torchtitan.models.llama.parallelize", "from torchtitan.data.loader import Loader"),
        ("torchtitan.parallel.fsdp", "from torchtitan.models.llama.model import Transformer"),
        ("torchtitan.parallel.fsdp", "from torchtitan.observe.metrics import Clock"),
        ("torchtitan.data.loader", "def f():\n    from torchtitan.parallel import mesh"),
        ("torchtitan.data.loader", "import datasets"),
        ("torchtitan.data.loader", "from . import packing"),
        ("torchtitan.observe.metrics", "class A:\n    import wandb"),
        ("torchtitan.observe.metrics", "try:\n    import wandb\nexcept ImportError:\n    pass"),
        ("torchtitan.training.loss", "from torchtitan.training.step import StepLoss"),
        ("torchtitan.training.build", "from train import main"),
        ("torchtitan.training.build", "from torchtitan.verbs.generate import sample"),
        ("torchtitan.elsewhere", "import os"),
    ],
)
def test_a_forbidden_import_is_found(module, line):
    assert len(broken_rules(module, line)) == 1


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("torchtitan.hardware", "def f():\n    import torch"),
        ("torchtitan.hardware", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch"),
        ("torchtitan.data.loader", "from torchtitan.observe.log import logger\nfrom torchtitan.data import packing"),
        ("torchtitan.data.sources", "def f():\n    import datasets"),
        ("torchtitan.training.step", "from torchtitan.parallel.mesh import Mesh\nimport torch"),
        ("benchmarks.loader", "from benchmarks import timing\nfrom torchtitan.training import build"),
    ],
)
def test_an_allowed_import_is_left_alone(module, line):
    assert broken_rules(module, line) == []


@pytest.mark.parametrize(
    "module",
    ["torchtitan.config.load", "torchtitan.hardware", "torchtitan.launch.node", "torchtitan.models.llama.args"],
)
def test_reading_a_config_loads_no_torch_and_takes_no_time(module):
    program = (
        f"import sys, time; t = time.perf_counter(); import {module}; print(time.perf_counter() - t, *sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    seconds, *loaded = out.split()
    assert "torch" not in loaded
    assert float(seconds) < 3  # 0.2 s on an idle core; the bound only has to tell it from an import of torch under load
