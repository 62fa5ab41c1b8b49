"""What attacks on a run folder found: nothing that a user made is moved, emptied or taken for something else."""

import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_runs import tiny_config, train_here
from torchtitan.__main__ import main
from torchtitan.checkpoint.storage import Manifest, Storage
from torchtitan.config.load import ConfigError, load_config
from torchtitan.observe.run_folder import open_run_folder
from torchtitan.parallel import collectives
from torchtitan.refusal import Refusal
from torchtitan.training.validate import Validator
from torchtitan.weights.targets import make_empty

SAVING = {"checkpoint__enable": True, "checkpoint__interval": 2, "checkpoint__keep_latest_k": 0}


def run(folder: Path, steps: int, **overrides: Any) -> list[dict[str, Any]]:
    try:
        return train_here(tiny_config(str(folder), training__steps=steps, **(SAVING | overrides)))
    finally:
        collectives.stop_process_group()  # a refused run leaves it running


def test_a_link_whose_disk_is_away_is_refused_and_moves_nothing(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/metrics.jsonl").write_text("records")
    (tmp_path / "run/checkpoint").symlink_to(tmp_path / "disk")
    with pytest.raises(Refusal, match="run/checkpoint is a link to .*/disk, which is away; mount its disk"):
        run(tmp_path / "run", 1)
    assert not (tmp_path / "run/earlier").exists()


def test_a_file_or_a_folder_that_cannot_be_listed_is_not_taken_for_an_empty_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(Refusal, match="is a file, where checkpoints need a folder"):
        Storage(str(tmp_path / "file")).steps()
    storage = Storage("memory://bucket/run")
    assert storage.steps() == []

    def fail(*_: Any, **__: Any) -> list[str]:
        raise ConnectionError("no route")

    monkeypatch.setattr(type(storage.fs), "ls", fail)
    with pytest.raises(Refusal, match="memory://bucket/run cannot be listed: no route"):
        storage.steps()


def test_a_link_to_another_disk_stays_and_what_lies_there_is_moved_there(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run/checkpoint").symlink_to(disk)
    (tmp_path / "curves").mkdir()
    (tmp_path / "curves/mine").touch()
    (disk / "notes").touch()
    run(tmp_path / "run", 1)
    (tmp_path / "run/tb").symlink_to(tmp_path / "curves")
    assert (tmp_path / "run/checkpoint").is_symlink() and (disk / "step-1").is_dir()
    assert not (tmp_path / "run/earlier").exists()  # the link led to an empty folder: used as it is
    run(tmp_path / "run", 1, checkpoint__enable=False)  # a fresh run in the same folder
    assert (tmp_path / "run/checkpoint").is_symlink()
    assert (disk / "earlier/1/step-1").is_dir() and Storage(str(disk)).steps() == [] and (disk / "notes").exists()
    assert (tmp_path / "run/earlier/1/tb").is_symlink() and (tmp_path / "curves/mine").exists()


@pytest.mark.parametrize("folder", ["s3://bucket/run", "a::b", "~nobody-of-this-name/x"])
def test_what_cannot_be_a_run_folder_is_refused(folder: str) -> None:
    with pytest.raises(ConfigError, match="must be a folder on a disk"):
        load_config(["--job.dump_folder", folder], 1)


def test_the_home_folder_is_expanded_once_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    assert load_config(["--job.dump_folder", "~/runs"], 1).job.dump_folder == "/home/someone/runs"


@pytest.mark.parametrize("folder", ["http://host/run", "file://", "s3://"])
def test_a_url_that_cannot_be_written_is_refused_before_the_run(folder: str) -> None:
    with pytest.raises(ConfigError, match="is no place to write"):
        load_config(["--checkpoint.enable", "--checkpoint.folder", folder], 1)


def test_a_verb_empties_only_what_it_made(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").touch()
    with pytest.raises(Refusal, match="was not made by this verb"):
        make_empty(mine)
    assert (mine / "thesis.txt").exists()
    for _ in range(2):
        make_empty(tmp_path / "made")
        assert len(list((tmp_path / "made").iterdir())) == 1
        (tmp_path / "made/of a drill").touch()


def test_a_checkpoint_that_cannot_be_read_is_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A folder in place of a file, and a loop of links: both cannot be read by root either."""
    run(tmp_path, 6)
    manifest, data = tmp_path / "checkpoint/step-6/manifest.json", tmp_path / "checkpoint/step-4/__0_0.distcp"
    manifest.unlink()
    manifest.mkdir()
    data.unlink()
    data.symlink_to(data)
    with caplog.at_level(logging.INFO):
        run(tmp_path, 8)
    assert "skipped the checkpoint of step 6: its manifest cannot be read" in caplog.text
    assert "skipped the checkpoint of step 4: __0_0.distcp cannot be read" in caplog.text
    assert "resuming from step 2" in caplog.text and Storage(str(tmp_path / "checkpoint")).steps()[0] == 8


def test_a_checkpoint_on_a_store_that_does_not_answer_is_not_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    storage = Storage("memory://disturbed/run")
    storage.fs.pipe("/disturbed/run/step-6/manifest.json", b"{}")
    assert "cannot be read" in str(storage.examine(6))

    def fail(*_: Any, **__: Any) -> None:
        raise ConnectionError("no route")

    monkeypatch.setattr(type(storage.fs), "_open", fail)
    with pytest.raises(Refusal, match="its manifest cannot be read now .no route.; start again when its storage"):
        storage.examine(6)
    manifest = Manifest(6, {"a": (1, 1)}, {}, "", {}, {})
    with pytest.raises(Refusal, match="a cannot be read now"):
        storage.faults(manifest, ["a"])


def test_a_checkpoint_that_lost_its_manifest_is_not_taken_for_none(tmp_path: Path) -> None:
    run(tmp_path, 2)
    (tmp_path / "checkpoint/step-2/manifest.json").unlink()
    with pytest.raises(Refusal, match=r"has checkpoints \(steps 2\), but none can be used"):
        run(tmp_path, 3)


def test_if_all_checkpoints_are_damaged_the_run_does_not_start_again(tmp_path: Path) -> None:
    run(tmp_path, 4)
    for path in (tmp_path / "checkpoint").glob("step-*/__0_0.distcp"):
        path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(Refusal, match=r"has checkpoints \(steps 4, 2\), but none can be used"):
        run(tmp_path, 6)
    assert not (tmp_path / "earlier").exists()


def test_a_run_that_is_killed_in_its_last_validation_makes_it_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    validation = {"validation__enable": True, "validation__dataset": "pydocs_validation", "validation__seq_len": 64,
                  "validation__steps": 1, "validation__freq": 100}  # fmt: skip

    def die(_: Validator) -> tuple[float, int]:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Validator, "measure", die)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path, 3, **validation)
    with caplog.at_level(logging.INFO):
        run(tmp_path, 3, **validation)
        assert "nothing is left to train" in caplog.text and "validation after step 3" in caplog.text
        caplog.clear()
        run(tmp_path, 3, **validation)
    assert "nothing is left to train" in caplog.text and "validation after" not in caplog.text


PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; from torchtitan.hardware import end_with_launcher;"
    "end_with_launcher(); print('ready', flush=True); time.sleep(60)"])
print(child.pid, flush=True)
child.wait()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel call is Linux's")
def test_ranks_end_with_the_process_that_started_them() -> None:
    environment = os.environ | {"TORCHELASTIC_RUN_ID": "x"}
    parent = subprocess.Popen([sys.executable, "-c", PARENT], env=environment, stdout=subprocess.PIPE, text=True)
    assert parent.stdout
    lines = [parent.stdout.readline() for _ in range(2)]
    child = next(int(line) for line in lines if line.strip().isdecimal())
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    end = time.monotonic() + 10
    while _lives(child):
        assert time.monotonic() < end
        time.sleep(0.05)


def _lives(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("name", ["WORLD_SIZE", "RANK"])
def test_a_place_that_is_no_number_is_refused(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "train.py"], env=os.environ | {name: "x"}, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1 and done.stderr.startswith(f"error: {name} = 'x' is no number")


@pytest.mark.parametrize("make", [lambda path: path.touch(), lambda path: path.mkdir(mode=0o555)], ids=["file", "mode"])
@pytest.mark.parametrize("name", ["tb", "earlier"])
def test_a_folder_of_the_run_that_cannot_be_written_is_refused_before_ranks_meet(
    tmp_path: Path, name: str, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path / name)
    if os.geteuid() == 0 and (tmp_path / name).is_dir():  # root may write anywhere
        touch = Path.touch
        monkeypatch.setattr(Path, "touch", lambda self: self.parent.name == name and fail(self) or touch(self))

    def fail(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    config = tiny_config(str(tmp_path))
    with pytest.raises(Refusal, match=f"job.dump_folder = '.*': {name} cannot be written: .*; choose another folder"):
        open_run_folder(config)


def test_a_command_line_that_is_not_utf8_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'--job.description=a\\udcff' is not UTF-8"):
        load_config(["--job.description=a\udcff"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["generate", "--checkpoint", "x", "--prompt", "p", "--temperature", "nan"],
            "--temperature nan is out of range",
        ),
        (["generate", "--checkpoint", "x", "--prompt", "p", "--temperature", "1e-40"], "--temperature 1e-40 is out of"),
        (["convert", "x", "y", "--shard_gb", "inf"], "--shard_gb inf is no size"),
        (["convert", "x", "y", "--shard_gb", "nan"], "--shard_gb nan is no size"),
    ],
)
def test_a_number_that_is_none_is_refused_by_its_option(words: list[str], message: str) -> None:
    with pytest.raises(SystemExit, match=f"error: {message}"):
        main(words)


def test_an_error_of_the_disk_in_a_verb_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(*_: Any) -> None:
        raise OSError(28, "No space left on device", "out/model.safetensors")

    monkeypatch.setattr("torchtitan.weights.stored.open_model", fill)
    with pytest.raises(SystemExit, match="error: .*No space left on device: 'out/model.safetensors'; check the path"):
        main(["convert", "x", "y"])
