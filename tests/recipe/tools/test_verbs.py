"""What `python -m torchtitan` answers by itself."""

import subprocess
import sys

import pytest

from torchtitan.__main__ import main


def test_a_misspelt_verb_is_answered_with_the_nearest() -> None:
    with pytest.raises(SystemExit, match="error: reach is no verb alone; use reach serve, reach join, reach leave$"):
        main(["reach", "--help"])
    with pytest.raises(SystemExit, match="error: dry_rum is no verb; did you mean dry_run?"):
        main(["dry_rum"])


def test_an_option_of_training_before_the_dashes_is_told_where_it_belongs(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["dry_run", "train_configs/debug_model.toml", "--training.steps", "3"])
    assert "unrecognized arguments: --training.steps 3; After --: options of train.py." in capsys.readouterr().err


def test_who_reads_only_the_head_of_the_list_of_verbs_sees_no_stack() -> None:
    listing = f"{sys.executable} -m torchtitan --help"
    shown = subprocess.run(["bash", "-c", f"{listing} | true"], capture_output=True, text=True, check=False)
    assert shown.stderr == ""
