"""The recipe without the planner and the fleet: a copy of the repository in which their folders are deleted."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from torchtitan.tools import verbs

ROOT = Path(__file__).parents[2]
THEIRS = ("titan_planner", "titan_fleet", "tests/planner", "tests/fleet", "benchmarks/planner", "benchmarks/fleet")
SHORT = "--training.steps 2 --training.seq_len 64 --lr_scheduler.warmup_steps 1 --validation.steps 1".split()
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("alone")
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines():
        if (ROOT / name).is_file() and not name.startswith(tuple(f"{their}/" for their in THEIRS)):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


def run(folder: Path, *command: str, seconds: int = 100) -> subprocess.CompletedProcess[str]:
    here = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {"PYTHON": sys.executable}
    return subprocess.run(command, cwd=folder, env=here, capture_output=True, text=True, timeout=seconds, check=False)


def test_the_first_command_trains_and_says_nothing_of_the_others(alone: Path) -> None:
    done = run(alone, "./run_llama_train.sh", *SHORT)
    assert done.returncode == 0, done.stderr
    assert "trained 2 steps" in done.stdout + done.stderr
    assert "swarm" not in (alone / "outputs/config.toml").read_text()


def test_every_verb_that_remains_answers(alone: Path) -> None:
    program = (
        "from torchtitan.tools import verbs\nfor verb in verbs.MODULES:\n    print(verb, verbs.load(verb)[0].HELP)"
    )
    done = run(alone, sys.executable, "-c", program)
    assert done.returncode == 0, done.stderr
    shown = {line.split(" ")[0] for line in done.stdout.splitlines()}
    assert shown == {verb.split(" ")[0] for group in verbs.OWN.values() for verb in group}


def test_a_section_of_the_fleet_is_refused_by_its_name(alone: Path) -> None:
    (alone / "swarm.toml").write_text('[swarm]\nsyncer = "https://meet.example.org:29700"\n')
    done = run(alone, sys.executable, "-m", "torchtitan", "check", "swarm.toml")
    assert (
        done.returncode and "[swarm] needs titan_fleet/ and titan_planner/ beside torchtitan/; add them" in done.stderr
    )


def test_the_fleet_without_the_planner_is_as_if_it_were_not_there(alone: Path) -> None:
    shutil.copytree(ROOT / "titan_fleet", alone / "titan_fleet")
    try:
        done = run(alone, sys.executable, "-m", "torchtitan", "--help")
    finally:
        shutil.rmtree(alone / "titan_fleet")
    assert done.returncode == 0 and "  prepare" in done.stdout and "  console" not in done.stdout, done.stderr


@pytest.mark.all  # test_imports.py reads that they import nothing of the others
def test_the_recipes_tests_are_found_and_its_rules_hold(alone: Path) -> None:
    found = run(alone, sys.executable, "-m", "pytest", "--collect-only", "-q", "tests/recipe", "tests/house")
    assert found.returncode == 0, found.stdout[-3000:]
    held = run(
        alone, sys.executable, "-m", "pytest", "-q", "tests/house/test_imports.py", "-k", "not plain and not loads"
    )
    assert held.returncode == 0, held.stdout[-3000:]


@pytest.mark.all
@pytest.mark.timeout(2400)
def test_the_recipes_tests_pass(alone: Path) -> None:
    for words in ("init -q", "add -A", "-c user.name=t -c user.email=t commit -qm copy"):  # some tests list or clone it
        assert run(alone, "git", *words.split()).returncode == 0
    done = run(alone, "./run_tests.sh", "recipe", seconds=2300)
    assert done.returncode == 0, done.stdout[-5000:]
