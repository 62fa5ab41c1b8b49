"""The command that `pip install .` makes, installed into a folder and used from another one."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.all, pytest.mark.slow]

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    clone, site = tmp_path_factory.mktemp("clone"), tmp_path_factory.mktemp("site")
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines():
        if (ROOT / name).is_file():
            (clone / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, clone / name)
    install = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "--target",
        site,
        clone,
    ]
    subprocess.run(install, check=True, timeout=100)
    return site


def command(site: Path, folder: Path, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    apart = {"PYTHONPATH": str(site), "PYTHONSAFEPATH": "1"}
    called = [sys.executable, str(site / "bin" / "torchtitan-recipe"), *words]
    return subprocess.run(
        called, cwd=folder, env={**os.environ, **apart, **env}, capture_output=True, text=True, timeout=100, check=False
    )


def test_the_command_trains_the_debug_model_in_an_empty_folder(site: Path, tmp_path: Path) -> None:
    options = ["--training.steps", "2", "--training.local_batch_size", "4", "--validation.steps", "1"]
    trained = command(site, tmp_path, "train", *options, "--metrics.sample_freq", "None", NGPU="2")
    assert trained.returncode == 0, trained.stderr
    assert "step   2/2" in trained.stderr + trained.stdout or "step 2/2" in trained.stderr + trained.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["outputs"]
    talked = command(site, tmp_path, "generate", "--prompt", "The", "--max_new_tokens", "3")
    assert talked.stdout.startswith("The"), talked.stderr


def test_a_shipped_file_is_found_by_its_name_in_a_clone(site: Path, tmp_path: Path) -> None:
    checked = command(site, tmp_path, "check", "train_configs/llama3_8b.toml")
    assert "shipped/train_configs/llama3_8b.toml has no mistake, but this machine lacks" in checked.stderr
    assert "python -m torchtitan download tokenizer" in checked.stderr


def test_another_torchtitan_in_the_same_place_is_named(site: Path, tmp_path: Path) -> None:
    other = tmp_path / "other" / "torchtitan-0.2.2.dist-info"
    other.mkdir(parents=True)
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: torchtitan\nVersion: 0.2.2\n")
    refused = command(site, tmp_path, "runs", PYTHONPATH=f"{site}{os.pathsep}{other.parent}")
    assert "torchtitan-recipe and torchtitan are both installed here" in refused.stderr
    assert "ImportError" in refused.stderr and refused.returncode == 1
