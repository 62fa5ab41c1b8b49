"""Who may import whom: the rules of docs/architecture.md, read off the source without running it.

A level may import the levels below it, so that a launcher reads a config without torch, the model can be lifted out
and used alone, and no mechanism knows which model it is applied to.
"""

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("torchtitan", "titan_planner", "titan_fleet", "benchmarks")  # those that are there: the recipe works alone
SOURCES = sorted([*(path for folder in FOLDERS for path in ROOT.glob(f"{folder}/**/*.py")), ROOT / "train.py"])
MODULES = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in SOURCES}

T = "torchtitan."
CONFIG = (T + "refusal", T + "root", T + "config")
SHAPES = (
    T + "models.spec",
    T + "models.stages",
    T + "models.balance",
    T + "models.split",
    T + "models.operations",
    T + "models.describe",
    T + "models.own",
    T + "models.own_file",
    T + "models.rules",
    T + "models.pipeline_rules",
    T + "models.seldom_rules",
    T + "models.families",
    T + "models.schedule_file",
    T + "models.downloads",
)  # of any model, no torch
FAMILIES = tuple(sorted(T + "models." + path.parent.name for path in ROOT.glob("torchtitan/models/*/spec.py")))
DECODER = T + "models.decoder"  # what families share; like them, nobody names it
WITH_EXPERTS = T + "models.experts"  # the same with experts
MIXTURE = T + "models.mixture"  # its modules, which the recipe divides over ranks
# What every room may import.
BELOW = (*CONFIG, T + "root", T + "foreign", T + "packages", T + "whole_file", T + "hardware", *SHAPES)
OWN = T + "own_model"
START = tuple(f"{T}launch.{path.stem}" for path in ROOT.glob("torchtitan/launch/*.py"))  # not the preflight
LAUNCH = (*START, T + "launch.preflight")
ROOMS = (T + "parallel", T + "data", T + "checkpoint", T + "observe")
PURE_TRAINING = tuple(T + "training." + name for name in ("loss", "optimizer"))
LORA = T + "lora"  # adapters of any model; names.py needs no torch
EXPERTS = T + "experts"  # in a run: divided over ranks, and kept equally busy
CORE = (*BELOW, *ROOMS, LORA, EXPERTS, T + "models.layers", MIXTURE, T + "weights", T + "training")
RECIPE_TOOLS = {  # each tool, and the other tools that it uses
    "check": (),
    "compare": (),
    "dry_run": (),
    "hub": (),
    "runs": (),
    "schema": ("verbs",),
    "seed_checkpoint": (),
    "start": ("check", "dry_run"),
    "text": (),
    "verbs": (),
}
P = "titan_planner."
PLANNER_ROOMS = {  # each room of the planner, and what it uses beside the recipe's core
    "netem": (P + "places",),
    "places": (P + "plan", T + "tools.dry_run"),
    "plan": (T + "tools.compare", T + "tools.dry_run", T + "tools.runs"),
    "plan_verb": (P + "places", P + "plan"),
    "probe": (P + "plan", T + "tools.dry_run"),
    "published": (P + "plan",),
    "sites": (P + "plan", P + "places", T + "tools.dry_run"),
}
F = "titan_fleet."
OF_FLEET = {  # each room of the fleet without torch, and what it uses beside what every room may
    "node": (*START, T + "tools.runs"),
    "ssh": (*START, F + "node", P + "probe.verb", P + "probe.report"),
    "submit": (*LAUNCH, F + "ssh.options", F + "ssh.terminal"),
    "reach": (*LAUNCH, F + "swarm.certificates"),
    "console": (*LAUNCH, F + "node", F + "ssh", T + "tools.runs"),
}
SWARM = (F + "swarm",)
DRILL = (F + "drill",)
WITHOUT_TORCH = tuple(F + room for room in OF_FLEET)
TABLES_OF_VERBS = (P + "verbs", F + "verbs")
OUTSIDE_A_PLAIN_RUN = (T + "own_model", T + "tools", T + "launch", "titan_planner", "titan_fleet")

# What may stand at the head of a file. Anything else is heavy or optional: imported by the one function that needs it.
LIGHT = {"pydantic", "pydantic_core", "tyro", "tomli", "tomli_w"}
OF_SWARM = {"uvicorn", "starlette", "anyio", "httpx", "cryptography", "safetensors"}  # its verbs load them
OF_CONSOLE = {"nicegui", "fastapi", "starlette", "uvicorn", "sqlalchemy"}  # its verbs load them when they run
DOORS = (F + "console.verb", F + "console.token")  # loaded for their line of help, where packages may be missing
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


def family_of(module: str) -> str | None:
    return next((family for family in (*FAMILIES, DECODER, WITH_EXPERTS) if within(module, (family,))), None)


def allowed_rooms(module: str) -> tuple[str, ...] | None:
    """The parts of torchtitan a module may import; None: it belongs nowhere yet."""
    if within(module, CONFIG):
        return CONFIG
    if within(module, SHAPES):
        return (*CONFIG, *SHAPES)
    if within(module, (OWN,)):
        return (*CORE, OWN)
    if within(module, (T + "hardware", T + "root", T + "foreign", T + "packages", T + "whole_file")):
        return BELOW
    if module == T + "models.layers":
        return CONFIG
    if module == MIXTURE:
        return (*CONFIG, T + "models.layers", WITH_EXPERTS + ".args")
    if within(module, (EXPERTS,)):
        return (*BELOW, T + "parallel", T + "observe.log", MIXTURE, EXPERTS)
    if family := family_of(module):
        shared = {DECODER: (), WITH_EXPERTS: (DECODER, MIXTURE)}.get(family, (DECODER, WITH_EXPERTS))
        below = (*CONFIG, T + "models.spec", T + "models.operations", *shared, f"{family}.args")
        return {
            f"{family}.args": below[:-1],
            f"{family}.hf": below,
            f"{family}.work": below,
            f"{family}.family": below,
            f"{family}.spec": (*below, family),
            f"{family}.parallelize": (*below, T + "models.layers", T + "parallel"),
        }.get(module, (*below, T + "models.layers", f"{family}.model"))
    if module in START:
        return (*BELOW, *START)
    if within(module, LAUNCH):
        return (*BELOW, *LAUNCH)
    if module == F + "packages":
        return (T + "packages",)
    if module == F + "section":
        return CONFIG
    if module in TABLES_OF_VERBS:
        return ()
    if module == F + "node.keeper":  # every run has one: it loads nothing else
        return (T + "refusal", T + "foreign", F + "node.processes")
    for room, others in OF_FLEET.items():
        if within(module, (F + room,)):
            return (*BELOW, F + "packages", F + room, *others)
    for room in ROOMS:
        if within(module, (room,)):
            return (*BELOW, T + "observe.log", room)
    if module in PURE_TRAINING:
        return (*BELOW, T + "observe.log", *PURE_TRAINING)
    if within(module, (T + "weights",)):
        return (*BELOW, *ROOMS, LORA, T + "weights")
    if module == T + "lora.run":
        return CORE
    if within(module, (T + "preference",)):
        return (*CORE, T + "preference")
    if within(module, (LORA,)):
        return (*BELOW, T + "parallel", LORA)
    if within(module, (T + "training",)):
        return CORE
    if within(module, SWARM):
        return (*CORE, F + "packages", F + "section", *SWARM)
    if within(module, DRILL):
        return (*CORE, OWN, *LAUNCH, P + "netem", *DRILL)
    if module == "train":
        return CORE
    if within(module, ("benchmarks",)):
        return ("torchtitan", "titan_planner", "titan_fleet")
    if module in (T + "installed", T + "__main__"):
        return (T + "refusal", T + "root", T + "tools", T + "__main__")
    for tool, others in RECIPE_TOOLS.items():
        if within(module, (T + "tools." + tool,)):
            return (*CORE, OWN, *LAUNCH, *(T + "tools." + name for name in (tool, *others)))
    for room, others in PLANNER_ROOMS.items():
        if within(module, (P + room,)):
            return (*CORE, OWN, *LAUNCH, P + room, *others)
    return None


def is_without_torch(module: str) -> bool:
    family = family_of(module)
    of_family = family is not None and module in tuple(
        f"{family}.{name}" for name in ("args", "hf", "work", "family", "spec")
    )
    return of_family or within(
        module, (*BELOW, *LAUNCH, *WITHOUT_TORCH, *TABLES_OF_VERBS, F + "packages", F + "section")
    )


def broken_rules(module: str, source: str) -> list[str]:
    rooms = allowed_rooms(module)
    if rooms is None:
        return [f"{module} is in none of the rooms of docs/architecture.md; give it one there and in allowed_rooms"]
    without_torch = is_without_torch(module)
    alone = module in (T + "models.layers", MIXTURE) or (family_of(module) is not None and not without_torch)
    outside = {"torch"} if alone else LIGHT if without_torch else ALWAYS_THERE
    outside = outside | OF_SWARM if within(module, (*SWARM, F + "reach")) else outside
    outside = outside | OF_CONSOLE if within(module, (F + "console",)) and module not in DOORS else outside
    broken = []
    for found in imports_of(source):
        if found.module.startswith("."):
            rule = "imports are absolute"
        elif found.package == "train":
            rule = "nothing imports train.py"
        elif found.package in FOLDERS:
            own = found.package == "benchmarks" == module.partition(".")[0]
            rule = "" if own or within(found.module, rooms) else f"it may import {', '.join(rooms)}"
        elif found.package in sys.stdlib_module_names or found.package in outside:
            rule = ""
        elif alone:
            rule = "a family imports torch and its own shapes, so that it can be used alone"
        elif without_torch and found.package == "torch":
            may = not within(module, (*CONFIG, *LAUNCH, *WITHOUT_TORCH)) and not module.endswith(
                (".args", ".hf", ".work")
            )  # in functions
            may = may or module in (T + "launch.ranks", T + "launch.preflight.devices")  # programs of their own
            rule = "a config is read without torch" if found.at_load or not may else ""
        else:
            rule = f"{found.package} is imported inside the function that needs it" if found.at_load else ""
        if rule:
            broken.append(f"{module}:{found.line} imports {found.module}: {rule}")
    return broken


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def test_the_recipes_tests_import_nothing_of_the_planner_or_the_fleet():
    others = ("titan_planner", "titan_fleet", "tests.planner", "tests.fleet", "benchmarks.planner", "benchmarks.fleet")
    tests = ROOT / "tests"
    for path in [*tests.glob("*.py"), *tests.glob("recipe/**/*.py"), *tests.glob("house/*.py")]:
        found = imports_of(path.read_text(encoding="utf-8"))
        assert not [each for each in found if within(each.module, others)], path


CODE = [path for path in SOURCES if path.name != "__init__.py"]


def test_a_file_imports_only_what_lies_below_it():
    assert [line for path in CODE for line in broken_rules(module_of(path), path.read_text(encoding="utf-8"))] == []


def test_no_file_imports_another_that_imports_it() -> None:
    """Imports inside functions count, too: only TYPE_CHECKING would hide that two files are one."""
    names = {module_of(path): path for path in CODE}
    needed = {
        name: {found.module for found in imports_of(path.read_text(encoding="utf-8"), set(names))} & set(names)
        for name, path in names.items()
    }
    list(TopologicalSorter(needed).static_order())  # a circle is an error that names it


INITS = [path for path in SOURCES if path.name == "__init__.py" and path.parent.name != "torchtitan"]


def test_an_init_file_is_empty_or_only_passes_names_on():
    for path in INITS:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in tree.body[1:] if ast.get_docstring(tree) else tree.body:
            names_all = isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
            works = not isinstance(node, (ast.Import, ast.ImportFrom)) and not names_all
            assert not works, f"{path}, line {node.lineno} does work at import"


FORBIDDEN = [
    ("torchtitan.config.load", "import torch"),
    ("torchtitan.config.load", "def f():\n    import torch"),
    ("torchtitan.config.load", "from torchtitan.observe import log"),
    ("torchtitan.config.rules", "from torchtitan.models.spec import Blueprint"),
    ("torchtitan.hardware", "import torch.distributed"),
    ("torchtitan.launch.node", "def f():\n    import torch"),
    ("torchtitan.launch.node", "from torchtitan.observe.log import logger"),
    ("torchtitan.launch.start", "def f():\n    from torchtitan.launch.preflight import member"),
    ("torchtitan.launch.start", "def f():\n    from titan_fleet.ssh import client"),
    ("torchtitan.tools.check", "def f():\n    from titan_planner.plan.search import search"),
    ("torchtitan.training.run", "from titan_fleet.swarm.join import join"),
    ("titan_planner.plan.search", "from titan_planner.places.network import is_unlike"),
    ("titan_planner.plan.search", "from titan_fleet.node.messages import Start"),
    ("titan_planner.published.rows", "from titan_planner.probe.rank import measure"),
    ("torchtitan.models.families", "from torchtitan.models.llama.args import LlamaArgs"),
    ("torchtitan.models.layers", "from torchtitan.models.decoder.args import DecoderArgs"),
    ("torchtitan.models.layers", "import numpy"),
    ("torchtitan.models.decoder.args", "from torchtitan.models.llama.args import LlamaArgs"),
    ("torchtitan.models.decoder.hf", "from torchtitan.models.decoder.model import Transformer"),
    ("torchtitan.models.llama.args", "from torch import nn"),
    ("torchtitan.models.decoder.model", "from torchtitan.parallel.mesh import Mesh"),
    ("torchtitan.models.decoder.model", "import numpy"),
    ("torchtitan.models.decoder.parallelize", "from torchtitan.data.loader import Loader"),
    ("torchtitan.parallel.fsdp", "from torchtitan.models.decoder.model import Transformer"),
    ("torchtitan.parallel.fsdp", "from torchtitan.observe.metrics import Clock"),
    ("torchtitan.data.loader", "def f():\n    from torchtitan.parallel import mesh"),
    ("torchtitan.data.loader", "import datasets"),
    ("torchtitan.data.loader", "from . import packing"),
    ("torchtitan.observe.metrics", "class A:\n    import wandb"),
    ("torchtitan.observe.metrics", "try:\n    import wandb\nexcept ImportError:\n    pass"),
    ("torchtitan.training.loss", "from torchtitan.training.step import StepLoss"),
    ("torchtitan.training.step", "from torchtitan.models.decoder.model import Transformer"),
    ("torchtitan.training.assemble", "from train import main"),
    ("torchtitan.training.assemble", "from torchtitan.tools.text.generate import sample"),
    ("train", "from torchtitan.tools.dry_run.estimate import estimate"),
    ("titan_fleet.node.program", "def f():\n    import torch"),
    ("titan_fleet.node.keeper", "from titan_fleet.node.jobs import Jobs"),
    ("titan_fleet.reach.node", "def f():\n    import torch"),
    ("titan_fleet.reach.node", "from titan_fleet.swarm.syncer.server import Server"),
    ("titan_fleet.console.library", "def f():\n    import torch"),
    ("titan_fleet.console.verb", "import nicegui"),
    ("titan_fleet.console.api", "from torchtitan.observe.log import logger"),
    ("titan_fleet.submit.verb", "from titan_fleet.node.messages import Start"),
    ("titan_fleet.elsewhere", "import os"),
    ("torchtitan.elsewhere", "import os"),
]


ALLOWED = [
    ("torchtitan.hardware", "def f():\n    import torch"),
    ("torchtitan.hardware", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch"),
    ("torchtitan.data.loader", "from torchtitan.observe.log import logger\nfrom torchtitan.data import packing"),
    ("torchtitan.data.texts.sources", "def f():\n    import datasets"),
    ("torchtitan.training.step", "from torchtitan.parallel.mesh import Mesh\nimport torch"),
    ("benchmarks.recipe.loader", "from benchmarks import timing\nfrom torchtitan.training import start"),
]


def test_an_allowed_import_is_left_alone():
    for module, line in ALLOWED:
        assert broken_rules(module, line) == []


READ_WITHOUT_TORCH = [
    "torchtitan.config.load",
    "torchtitan.hardware",
    "torchtitan.launch.start",
    "torchtitan.launch.preflight.verb",
    "torchtitan.models.families",
    *(f"{family}.spec" for family in FAMILIES),
    *(F + name for name in ("node.verb", "ssh.terminal", "console.verb", "console.token", "reach.join", "reach.serve")),
]
WITHOUT_TORCH_PROGRAM = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
    assert "torch" not in sys.modules, name
"""


def test_reading_a_config_loads_no_torch():
    """Which takes seconds, where a config is read in 0.2 s."""
    modules = [name for name in READ_WITHOUT_TORCH if name in MODULES]
    subprocess.run([sys.executable, "-c", WITHOUT_TORCH_PROGRAM, *modules], cwd=ROOT, check=True)


NAMES = re.compile("|".join(family.rpartition(".")[2] for family in FAMILIES), re.IGNORECASE)
# Words that are no model of ours: the script's name, the default of model.name, and classes of others' tokenizers.
OTHER_WORDS = re.compile(r"run_llama_train|train_configs/\w+|Llama\w*Tokenizer\w*|meta-llama/[\w.-]+")
DEFAULT_NAME = 'name: str = "llama3"'


def names_of_families(source: str) -> list[str]:
    """Identifiers and strings of code, other than docstrings, that name a family."""
    tree = ast.parse(source.replace(DEFAULT_NAME, "name: str"))
    documents = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) is not None
    }
    texts = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documents:
            texts.append(node.value)
        texts += [
            value for _, value in ast.iter_fields(node) if isinstance(value, str) and not isinstance(node, ast.Constant)
        ]
    return [text for text in texts if NAMES.search(OTHER_WORDS.sub("", text))]


def test_outside_models_no_module_names_a_family():
    for path in CODE:
        if path.parts[len(ROOT.parts)] != "benchmarks" and "models" not in path.parts:
            assert names_of_families(path.read_text(encoding="utf-8")) == [], path


LOADED = """
import atexit, runpy, sys
atexit.register(lambda: print(*[m.__file__ for n, m in sys.modules.items() if n.startswith(("torchtitan.", "titan_"))]))
runpy.run_path("train.py", run_name="__main__")
"""


def test_a_plain_run_loads_only_the_core_and_at_most_7800_lines_of_it(tmp_path):
    """From the first import to the last line of the log of the debug model."""
    options = "--training.steps 2 --lr_scheduler.warmup_steps 1 --training.seq_len 64 --validation.steps 1".split()
    words = ["--job.config_file", "train_configs/debug_model.toml", "--job.dump_folder", str(tmp_path), *options]
    command = [sys.executable, "-c", LOADED, *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    files = [ROOT / "train.py", *map(Path, done.stdout.splitlines()[-1].split())]
    keys = [ROOT / "titan_fleet" / name for name in ("__init__.py", "section.py")]  # [swarm]
    outside = [path for path in files if within(module_of(path), OUTSIDE_A_PLAIN_RUN) and path not in keys]
    num_lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files if path not in keys)
    assert not outside and num_lines <= 7800  # blank lines and comments, too


def test_a_folder_has_at_most_16_files():
    folders = Counter(path.parent for path in SOURCES if path.name != "__init__.py")
    assert {str(folder): count for folder, count in folders.items() if count > 16} == {}


def test_a_file_and_a_function_hold_one_idea():
    for path in SOURCES:
        if path.is_relative_to(ROOT / "benchmarks"):
            continue
        source = path.read_text(encoding="utf-8")
        assert len(source.splitlines()) <= 350, path
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name != "main":
                assert node.end_lineno - node.lineno <= 60, f"{path}: {node.name}, line {node.lineno}"
