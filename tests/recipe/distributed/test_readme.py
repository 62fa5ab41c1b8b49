"""The commands of README and docs/README.md, run as they stand in a copy of the tree; only training is made shorter."""

import functools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from tests import started
from tests.ports import free_port
from torchtitan.root import PACKAGES

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.timeout(300)  # README's commands take as many cores as there are, and others may use them
README, PAGES = (ROOT / "README.md").read_text(), (ROOT / "docs/README.md").read_text()
OTHERS = re.compile(r"torchtitan (plan|netem|launch|console|reach|swarm|drill)\b")  # verbs of the other two packages
COMMANDS = [
    command
    for command in [
        *(line for block in re.findall(r"```bash\n(.*?)```", README, re.DOTALL) for line in block.splitlines()),
        *re.findall(r"^\| [^|]* \| `([^`]+)` \| \[", README + PAGES, re.MULTILINE),  # what, command, page
    ]
    if not command.startswith("git clone") and (len(PACKAGES) == 3 or not OTHERS.search(command))
]
SHORT = "--training.steps 3 --training.seq_len 64 --lr_scheduler.warmup_steps 1 --metrics.log_freq 1"
SHORT += " --validation.steps 1"
FIRST = f"./run_llama_train.sh {SHORT}"


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files a clone would have, as they are now."""
    folder = tmp_path_factory.mktemp("clone")
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


@functools.cache
def run(command: str, clone: Path) -> subprocess.CompletedProcess[str]:
    """In place of the script the program that it starts, forked; tests/house/test_alone.py starts the script."""
    environment = os.environ | {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    words = shlex.split(command)
    while "=" in words[0]:
        name, _, value = words.pop(0).partition("=")
        environment[name] = value
    if words[0] == "./run_llama_train.sh" and words[1:] != ["--help"]:
        words[:1] = [sys.executable, "-m", "torchtitan.tools.start"]
    return started.run(words, cwd=clone, env=environment, capture_output=True, text=True, timeout=280)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_readme_works(command: str, clone: Path) -> None:
    if "llama3_8b.toml" in command and "run_llama_train" in command:
        # Eight GPUs are not here: what can be wrong before they are needed is.
        command = "python -m torchtitan check train_configs/llama3_8b.toml --world_size 8"
    if "check train_configs/llama3_8b.toml" in command:  # README downloads the tokenizer first
        shutil.copytree(ROOT / "tests/assets/tokenizer", clone / "assets/hf/Llama-3.1-8B", dirs_exist_ok=True)
    if re.search("torchtitan (compare|console|download|drill|swarm)", command):
        command += " --help"  # tests/recipe/tools/ and tests/fleet run them
    elif "run_llama_train.sh" in command and not any(word in command for word in ("--help", "PRINT_ONLY")):
        command = f"{command.replace('--training.steps 20', '')} {SHORT}"
    command = re.sub(r"(^|\s)(\.venv/bin/)?python\b", rf"\1{sys.executable}", command)
    done = run(command, clone)
    assert done.returncode == 0, done.stderr[-3000:]
    if "dry_run train_configs/llama3_70b.toml" in command:
        held = re.search(r"holds ([\d.]+) GiB at its peak", done.stdout)
        assert held and f"; {float(held[1]):.1f}; " in README  # the table of models
    if SHORT in command:
        named = re.search(r"--job.dump_folder (\S+)", command)
        folder = clone / (named[1] if named else "outputs")
        records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        assert [record["step"] for record in records] == [1, 2, 3]
        assert "trained 3 steps" in done.stdout + done.stderr


def test_what_the_last_line_says_shows_the_run(clone: Path) -> None:
    done = run(FIRST, clone)
    command = re.search(r"look at it: (.* --logdir \S+), then open", done.stderr)
    assert command, done.stderr
    port = free_port()
    # exec, so that what is ended below is TensorBoard and not a shell around it
    server = subprocess.Popen(["bash", "-c", f"exec {command[1]} --port {port}"], cwd=clone, stderr=subprocess.DEVNULL)
    try:
        url = f"http://localhost:{port}/data/plugin/scalars/tags"
        for _ in range(120):
            try:
                with urllib.request.urlopen(url, timeout=5) as answer:
                    tags = json.load(answer)
                if tags:
                    break
            except OSError:
                pass
            time.sleep(0.5)
        assert {"loss/train", "loss/validation", "speed/mfu"} <= set(tags["tb"])
    finally:
        server.kill()
        server.wait()


def test_an_error_on_several_ranks_ends_the_whole_run_with_its_message(clone: Path) -> None:
    done = run(f"NGPU=2 ./run_llama_train.sh {SHORT} --training.dataset_path nowhere.jsonl", clone)
    assert done.returncode != 0
    assert "dataset_path = 'nowhere.jsonl': no file matches" in done.stdout + done.stderr
