"""What a client may do with a checkpoint of a run: two verbs, in bounds, by the run's own code."""

import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fleet.node.machines import JOB, Program, archive, pieces, processes_of
from titan_fleet.node import checkpoints
from titan_fleet.node.folders import Folders
from titan_fleet.node.messages import Generate
from torchtitan.refusal import Refusal

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="verbs are run on Linux alone")
# Says what it was given; its prompt says what else it does.
VERB = """
import json, os, signal, subprocess, sys, time
words = sys.argv[1:]
if words[0] == "convert":
    if os.path.exists(words[1] + "/broken"):
        os.mkdir(words[2])
        sys.exit("error: this checkpoint is damaged")
    os.mkdir(words[2])
    open(words[2] + "/model.safetensors", "w").write("weights")
else:
    prompt = words[3].removeprefix("--prompt=")
    if prompt == "wait":
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(321.5)"], start_new_session=True)
        time.sleep(321.5)
    if prompt == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    print(json.dumps([words, os.getcwd(), os.environ["CUDA_VISIBLE_DEVICES"]]) if prompt != "loud" else "x" * 10**6)
"""
FILES = {"torchtitan/launch/start.py": "", "torchtitan/__init__.py": "", "torchtitan/tools/start.py": JOB}
CODE = archive(FILES | {"torchtitan/__main__.py": VERB})


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Program]:
    home, watched = tmp_path_factory.mktemp("home"), tmp_path_factory.mktemp("watched")
    (watched / "theirs/checkpoint/step-3").mkdir(parents=True)
    (watched / "theirs/config.toml").write_text("")
    (watched / "theirs/checkpoint/step-3/manifest.json").write_text("{}")
    running = Program(home, "--watch", str(watched))
    put = pieces(CODE)
    assert running.ask(**put)["is_here"]
    running.ask(do="start", run="mine", config="lines = 1", code=put["name"])
    running.wait("mine", "ended")
    for step in (3, 4):
        (home / f"runs/mine/checkpoint/step-{step}").mkdir(parents=True)
        (home / f"runs/mine/checkpoint/step-{step}/manifest.json").write_text("{}")
    (home / "runs/mine/checkpoint/step-4/broken").touch()
    (home / "runs/mine/step-9").symlink_to(watched / "theirs/checkpoint/step-3")
    yield running
    running.close()


def generate(prompt: str, path: str = "checkpoint/step-3", **more: Any) -> dict[str, Any]:
    return {"do": "generate", "run": "mine", "checkpoint": path, "prompt": prompt, "tokens": 5, "temperature": 0} | more


@pytest.mark.parametrize("prompt", ["Once", "--checkpoint", "--", "$(touch /tmp/x); `id`\n\t'\"", "né 漢"])
def test_a_prompt_of_any_words_is_one_argument_of_the_runs_own_code(program: Program, prompt: str) -> None:
    answer = program.ask(**generate(prompt))
    assert answer["kind"] == "generate", answer
    words, place, devices = json.loads(answer["made"])
    folder = str(program.home / "runs/mine/checkpoint/step-3")
    numbers = ["--max_new_tokens", "5", "--temperature", "0.0"]
    assert words == ["generate", "--checkpoint", folder, f"--prompt={prompt}", *numbers]
    assert place == str(program.home / "code" / pieces(CODE)["name"]) and devices == ""


def test_what_a_verb_prints_is_cut_and_how_it_dies_is_said(program: Program) -> None:
    assert program.ask(**generate("loud"))["made"] == "x" * 2**16
    assert "ends with -9" in program.ask(**generate("die"))["why"]


def test_a_verb_ends_in_time_with_what_it_started(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "GENERATE_SECONDS", 1)
    here = checkpoints.Checkpoints(Folders(program.home / "runs", []))
    wish = Generate(id=1, **{name: value for name, value in generate("wait").items() if name != "do"})
    with pytest.raises(Refusal, match="generate takes over 1 s here"):
        here.generate(wish)
    assert "sleep(321.5)" not in "".join(_words_of_all())
    with here._free, pytest.raises(Refusal, match="reads another checkpoint"):
        here.generate(wish)


def _words_of_all() -> Iterator[str]:
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        try:
            yield Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
        except OSError:
            continue


def test_an_export_is_whole_or_absent_and_is_made_once(program: Program) -> None:
    asked = {"do": "export", "run": "mine", "checkpoint": "checkpoint/step-3"}
    assert program.ask(**asked)["made"] == "export/step-3"
    weights = program.home / "runs/mine/export/step-3/model.safetensors"
    weights.write_text("the first")
    assert program.ask(**asked)["made"] == "export/step-3" and weights.read_text() == "the first"
    assert program.ask(**asked | {"checkpoint": "checkpoint/step-4"})["why"] == "this checkpoint is damaged"
    assert os.listdir(program.home / "runs/mine/export") == ["step-3"]
    assert processes_of(program.home) == {}


@pytest.mark.parametrize(
    "path", ["../mine/checkpoint/step-3", "/etc", "step-9", "checkpoint", "checkpoint/step-7", "node/0"]
)
def test_only_a_checkpoint_inside_the_run_is_read(program: Program, path: str) -> None:
    for asked in (generate("a", path), {"do": "export", "run": "mine", "checkpoint": path}):
        assert program.ask(**asked)["kind"] == "refused"


@pytest.mark.parametrize(
    "wrong",
    [
        {"do": "export", "run": "@0/theirs", "checkpoint": "checkpoint/step-3"},
        generate("a\0b"),
        generate(""),
        generate("x" * 8193),
        generate("a", tokens=0),
        generate("a", temperature=-1),
        generate("a") | {"do": "convert"},
    ],
    ids=range(7),
)
def test_what_is_out_of_bounds_is_no_message(program: Program, wrong: dict[str, Any]) -> None:
    program.write(json.dumps({"id": 1} | wrong).encode())
    answer = program.read()
    assert (answer["id"], answer["kind"]) == (None, "refused")


def test_a_watched_run_is_read_by_this_programs_code_and_code_that_is_gone_is_said(program: Program) -> None:
    why = program.ask(**generate("a", run="@0/theirs", temperature=0.001))["why"]
    assert "--temperature 0.001 is out of range" in why  # as this recipe's own verb says it
    shutil.rmtree(program.home / "code" / pieces(CODE)["name"])
    assert "the code of run = mine is not on this machine" in program.ask(**generate("a"))["why"]
