"""A run on conversations shows what it changed, and a task shows that the model has learned."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from asked import CHATS, CHOICES

from tests.tiny_runs import read_records, tiny_config, train_here
from torchtitan.observe.log import logger

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def trained(folder: Path, caplog: pytest.LogCaptureFixture, **keys: Any) -> tuple[list[dict[str, Any]], str]:
    """Records, and what was logged."""
    caplog.clear()
    logger.addHandler(caplog.handler)
    try:
        with caplog.at_level(logging.INFO, logger=logger.name):
            records = train_here(tiny_config(folder, **CHATS | keys))
    finally:
        logger.removeHandler(caplog.handler)
    return records, "\n".join(record.getMessage() for record in caplog.records)


def test_ten_conversations_are_shown_before_and_after(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    whole, said = trained(tmp_path / "whole", caplog, training__steps=20)
    kept = json.loads((tmp_path / "whole/answers.json").read_text())
    assert all(len(kept[name]) == 10 for name in ("asked", "expected", "before", "after"))
    assert kept["asked"][0] == "User: What is 7 + 2?\nAssistant:" and kept["expected"][0] == "9."
    before, after = ([answer["loss"] for answer in kept[when]] for when in ("before", "after"))
    assert sum(after) < sum(before) - 20 and not any(answer["ended"] for answer in kept["before"])
    table = said[said.index("10 held-out conversations before and after this run, 1") :].splitlines()
    assert f"  {before[0]:7.3f} -> {after[0]:7.3f}  'User: What is 7 + 2?\\nAssistant:': " in table[1]
    ended = sum(answer["ended"] for answer in kept["after"])
    assert f"on average; ended by the end mark 0 -> {ended}, as in the data 0 -> " in table[11]

    plain, said = trained(tmp_path / "plain", caplog, training__steps=20, validation__enable=False)
    assert "held-out conversations" not in said and not (tmp_path / "plain/answers.json").exists()
    assert [record["loss"] for record in plain] == [record["loss"] for record in whole]


def test_a_resumed_run_compares_with_its_own_beginning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saving = {"checkpoint__enable": True, "lr_scheduler__total_steps": 6}
    trained(tmp_path, caplog, training__steps=3, **saving)
    first = json.loads((tmp_path / "answers.json").read_text())
    trained(tmp_path, caplog, training__steps=6, **saving)
    second = json.loads((tmp_path / "answers.json").read_text())
    assert second["before"] == first["before"] and second["after"] != first["after"]

    fewer = (ROOT / "tests/assets/chat/validation.jsonl").read_text().splitlines(keepends=True)[3:]
    (tmp_path / "fewer.jsonl").write_text("".join(fewer))
    others = {"validation__dataset_path": tmp_path / "fewer.jsonl", "lr_scheduler__total_steps": 8}
    _, said = trained(tmp_path, caplog, training__steps=8, **saving | others)
    third = json.loads((tmp_path / "answers.json").read_text())
    assert "this run began with other held-out conversations; from here on the table compares with answers" in said
    assert third["asked"][0] == first["asked"][3] and third["before"][0] == pytest.approx(second["after"][3])


def test_a_fine_tune_shows_in_the_score(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A model of 0.4 million parameters learns it in seconds."""
    pytest.importorskip("lm_eval")
    keys = {"training__steps": 120, "validation__steps": 1, "validation__tasks": [CHOICES], "validation__freq": 1000}
    faster = {"optimizer__name": "Muon", "optimizer__lr": 3e-2, "lr_scheduler__warmup_steps": 10}
    trained(tmp_path / "first", caplog, **keys | {"training__steps": 1})
    trained(tmp_path / "last", caplog, **keys | faster)
    (chance,), (learned,) = (read_records(tmp_path / name, "validation.jsonl") for name in ("first", "last"))
    assert chance["choices/acc"] < 0.4 and learned["choices/acc"] > 0.9
