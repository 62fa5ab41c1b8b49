"""`generate --prompts FILE --out FILE`: many prompts at once get what each gets alone."""

import json
from pathlib import Path
from typing import Any

import pytest
from asked import TEMPLATE

from tests.stored_models import store_run
from torchtitan.__main__ import main
from torchtitan.tools.text import many

ROOT = Path(__file__).parents[3]
GREEDY = ["--temperature", "0", "--max_new_tokens", "12"]


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> str:
    keys = {"model__chat_template": TEMPLATE, "training__mixed_precision_param": "float32"}
    return str(store_run(tmp_path_factory.mktemp("many") / "run", **keys))


def answered(run: str, folder: Path, rows: list[Any], *words: str) -> list[dict[str, Any]]:
    (folder / "in.jsonl").write_text("".join(json.dumps(row) + "\n\n" for row in rows))
    main(["generate", "--checkpoint", run, "--prompts", f"{folder}/in.jsonl", "--out", f"{folder}/out.jsonl", *words])
    return [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("room", [1 << 15, 60], ids=["one batch", "several"])
def test_texts_of_unlike_length_get_what_each_gets_alone(
    room: int, run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(many, "_BATCH_TOKENS", room)
    texts = ["The module", "x", "A longer text, of which the model has to see all that stands in it:"]
    found = answered(run, tmp_path, [texts[0], {"prompt": texts[1]}, texts[2]], *GREEDY)
    assert [row["prompt"] for row in found] == texts
    for row in found:
        capsys.readouterr()
        main(["generate", "--checkpoint", run, "--prompt", row["prompt"], *GREEDY])
        assert capsys.readouterr().out == f"{row['prompt']}{row['answer']}\n"
    drawing = ["--temperature", "1.5", "--seed", "3", "--max_new_tokens", "12"]
    drawn = answered(run, tmp_path, texts, *drawing)
    assert drawn[:1] == answered(run, tmp_path, texts[:1], *drawing)  # whatever is drawn beside it


def test_conversations_get_what_the_chat_answers(
    run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    system = {"role": "system", "content": "Write numbers as words."}
    messages = [system, {"role": "user", "content": "What is 3 + 3?"}]
    found = answered(run, tmp_path, ["Add 4 and 5.", {"messages": messages}], "--chat", *GREEDY)
    for row, words in zip(found, ([], ["--system", system["content"]]), strict=True):
        question = row["prompt"] if isinstance(row["prompt"], str) else row["prompt"][-1]["content"]
        capsys.readouterr()
        main(["generate", "--checkpoint", run, "--chat", *words, "--prompt", question, *GREEDY])
        assert capsys.readouterr().out.strip() == row["answer"] and row["ended"] is False
    assert len(found) == 2


def test_an_answer_that_ended_by_itself_is_told_from_one_that_was_cut(
    run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = answered(run, tmp_path, ["The module", "x"], *GREEDY)
    assert [row["ended"] for row in whole] == [False, False]
    monkeypatch.setattr("torchtitan.tools.text.writer.stop_ids", lambda *_: set(range(0, 2048, 2)))
    ended = answered(run, tmp_path, ["The module", "x"], *GREEDY)
    assert all(row["ended"] for row in ended)
    assert all(cut["answer"].startswith(row["answer"]) for cut, row in zip(whole, ended, strict=True))


@pytest.mark.parametrize(
    ("line", "words", "message"),
    [
        ("nothing", [], "in.jsonl, line 1: no JSON .*; write a text in quotes"),
        ('{"text": "a"}', [], "in.jsonl, line 1: expected a text, or an object with 'prompt'"),
        ('{"messages": [{"role": "user"}]}', ["--chat"], "in.jsonl, line 1: expected a text"),
        (
            '{"messages": [{"role": "user", "content": "a"}]}',
            [],
            "line 1: messages need the chat template",
        ),
        ("", [], "in.jsonl holds no prompt"),
        (
            '"a b c"',
            ["--max_new_tokens", "131071"],
            "prompt 1 has .* tokens, and with 131071 new ones the model",
        ),
        ('"a"', ["--prompt", "b"], "--prompts FILE and --out FILE belong together, without --prompt"),
    ],
)
def test_what_cannot_be_answered_is_refused(
    line: str, words: list[str], message: str, run: str, tmp_path: Path
) -> None:
    file = tmp_path / "in.jsonl"
    file.write_text(f"{line}\n")
    with pytest.raises(SystemExit, match=message):
        main(["generate", "--checkpoint", run, "--prompts", str(file), "--out", str(tmp_path / "out"), *words])


def test_a_file_that_is_not_there_is_refused(run: str, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="--prompts .*none.jsonl cannot be read"):
        main(["generate", "--checkpoint", run, "--prompts", str(tmp_path / "none.jsonl"), "--out", "x"])
