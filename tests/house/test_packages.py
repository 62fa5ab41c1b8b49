"""The packages of a part that are missing: installed into .venv, or refused with the line that installs them."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from torchtitan import packages
from torchtitan.refusal import Refusal

LACKING = ["no_such_package_of_ours"]


def test_what_is_there_is_asked_for_nothing() -> None:
    packages.require_packages("titan_fleet", ["json"], installs=True)


def test_a_rank_or_another_python_is_told_the_line() -> None:
    with pytest.raises(Refusal, match=r"\(no_such_package_of_ours\): .* -m pip install -r .*requirements.txt"):
        packages.require_packages("titan_fleet", LACKING, installs=False)


def test_an_installed_package_is_told_where_its_extra_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(packages, "INSIDE", tmp_path)
    with pytest.raises(Refusal, match=re.escape("in the clone that this was installed from: ")):
        packages.require_packages("titan_fleet", LACKING, installs=True)


def test_in_a_clones_environment_pip_is_called_and_its_failure_is_said(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(packages, "ROOT", Path(sys.prefix).parent)
    monkeypatch.setattr(sys, "prefix", str(Path(sys.prefix).parent / ".venv"))
    called = []

    def run(command: list[str], check: bool) -> "subprocess.CompletedProcess[str]":
        called.append(command)
        return subprocess.CompletedProcess(command, 1)

    monkeypatch.setattr(packages.subprocess, "run", run)
    with pytest.raises(Refusal, match="pip could not install .*; fix the error above and run this again"):
        packages.require_packages("titan_fleet", LACKING, installs=True)
    assert called[0][1:4] == ["-m", "pip", "install"]
    assert "setup: installing titan_fleet/requirements.txt into .venv, only this once" in capfd.readouterr().err
