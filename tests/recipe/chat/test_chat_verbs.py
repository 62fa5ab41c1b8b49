"""`data` shows what a run reads, and `generate --chat` talks by the template, as transformers would."""

import io
import json
import re
import sys
from pathlib import Path

import pytest

from tests.stored_models import store_run
from tests.tiny_runs import read_records, tiny_config, train_here
from torchtitan.__main__ import main

ROOT = Path(__file__).parents[3]
TEMPLATE = "tests/assets/chat/chat_template.jinja"
CHATS = ["--training.dataset_path", "tests/assets/chat/train.jsonl", "--training.chat"]


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def test_the_verb_shows_examples_with_what_is_learned_and_figures(capsys: pytest.CaptureFixture[str]) -> None:
    main(["data", "train_configs/chat_debug.toml", "--examples", "2", "--sequences", "16"])
    said = capsys.readouterr().out
    first, second, figures = re.split(r"^--- .*\n", said, flags=re.MULTILINE)[1:]
    for example in (first, second):
        learned = re.findall(r"<<(.*?)>>", example.replace("<|end_of_text|>", "(end)"))
        assert learned and all(part.endswith(".(end)") for part in learned)
        assert example.startswith("<|begin_of_text|>") and example.count("Assistant:") == len(learned)
    assert re.search(
        r"--- 16 sequences hold \d+ documents or parts of them, [\d.]+ each; of 4,096 places 1\d\.\d% ", said
    )
    assert re.match(r"tests/assets/chat/train.jsonl: of \d+ conversations so far, 0 were cut after 256 tokens", figures)


def test_the_verb_counts_what_is_cut_dropped_or_melted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    template = tmp_path / "own.jinja"
    template.write_text((ROOT / TEMPLATE).read_text().replace("'Assistant:' }}", "'Assistant: ' }}"))
    options = ["--training.seq_len", "48", "--model.chat_template", str(template)]
    main(["data", "train_configs/chat_debug.toml", "--examples", "0", "--", *options])
    said = capsys.readouterr().out
    cut, dropped = (int(n.replace(",", "")) for n in re.findall(r"([\d,]+) were (?:cut|dropped)", said))
    assert cut > 20 and dropped >= 0
    assert re.search(r"  [\d,]+ tokens hold the last character of a header and the first of an answer; they are", said)


def test_the_verb_shows_plain_text_too(capsys: pytest.CaptureFixture[str]) -> None:
    main(["data", "train_configs/debug_model.toml", "--examples", "1", "--sequences", "8"])
    said = capsys.readouterr().out
    assert (
        "--- 8 sequences hold" in said and "conversations" not in said and "of 2,048 places 100.0% are learned" in said
    )


def test_what_the_verb_cannot_show_is_refused() -> None:
    with pytest.raises(SystemExit, match="--examples is 0 or more, --sequences 1 or more"):
        main(["data", "train_configs/chat_debug.toml", "--sequences", "0"])
    with pytest.raises(SystemExit, match="brings its own data"):
        main(["data", "examples/digits/train.toml"])


def test_an_answer_is_what_transformers_generates_and_the_next_prompt_holds_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    transformers = pytest.importorskip("transformers")
    import torch

    run = store_run(tmp_path / "run", model__chat_template=TEMPLATE, training__mixed_precision_param="float32")
    main(["convert", str(run), str(tmp_path / "hf")])
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    messages, expected = [{"role": "system", "content": "Write numbers as words."}], []
    for question in ("What is 3 + 3?", "Add 4 and 5."):
        messages.append({"role": "user", "content": question})
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
        ids = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=20)[0, len(prompt) :]
        answer = tokenizer.decode(ids, skip_special_tokens=True)
        messages.append({"role": "assistant", "content": answer.strip()})
        expected.append(answer)
    capsys.readouterr()
    options = ["generate", "--checkpoint", str(run), "--chat", "--temperature", "0", "--max_new_tokens", "20"]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sys, "stdin", io.StringIO("What is 3 + 3?\nAdd 4 and 5.\n\nWhat is 3 + 3?\n"))
        main([*options, "--system", "Write numbers as words."])
    first, second = expected
    assert capsys.readouterr().out == (
        f"Type a message. An empty line begins anew; Ctrl-D ends.\n{first}\n{second}\n{first}\n"
    )
    main([*options, "--system", "Write numbers as words.", "--prompt", "What is 3 + 3?"])
    assert capsys.readouterr().out == f"{first}\n"


def test_what_cannot_be_talked_about_is_refused(tmp_path: Path) -> None:
    run = str(store_run(tmp_path / "run"))
    with pytest.raises(SystemExit, match="--system opens a conversation; give --chat, too"):
        main(["generate", "--checkpoint", run, "--system", "a"])
    with pytest.raises(SystemExit, match="conversations need a chat template"):
        main(["generate", "--checkpoint", run, "--chat", "--prompt", "a"])
    talks = str(store_run(tmp_path / "talks", model__chat_template=TEMPLATE))
    with pytest.raises(SystemExit, match="--prompt holds an empty text"):
        main(["generate", "--checkpoint", talks, "--chat", "--prompt", " "])


def test_a_run_on_conversations_learns_and_resumes_to_the_bit(tmp_path: Path) -> None:
    keys = {
        "model__chat_template": TEMPLATE,
        "model__attn_mask_type": "block_causal",
        "training__dataset_path": "tests/assets/chat/train.jsonl",
        "training__chat": "all",
        "training__seq_len": 128,
        "validation__enable": True,
        "validation__dataset": "x",
        "validation__dataset_path": "tests/assets/chat/validation.jsonl",
        "validation__chat": "all",
        "validation__seq_len": 128,
        "validation__freq": 30,
        "checkpoint__enable": True,
        "checkpoint__interval": 15,
    }
    exports = {"checkpoint__last_save_in_hf": True, "checkpoint__last_save_model_only": True}
    whole = train_here(tiny_config(tmp_path / "whole", training__steps=30, **keys, **exports))
    assert (tmp_path / "whole/hf/chat_template.jinja").read_text() == Path(TEMPLATE).read_text()
    train_here(tiny_config(tmp_path / "parts", training__steps=15, lr_scheduler__total_steps=30, **keys))
    parts = train_here(tiny_config(tmp_path / "parts", training__steps=30, **keys))
    assert [record["loss"] for record in whole] == [record["loss"] for record in parts]
    (held_out,) = read_records(tmp_path / "whole", "validation.jsonl")
    lines = (ROOT / "tests/assets/chat/validation.jsonl").read_text().splitlines()
    answers = sum(message["role"] == "assistant" for line in lines for message in json.loads(line)["messages"])
    assert held_out["validation_tokens"] >= 3 * answers  # each has a value, a full stop and the end
    assert held_out["validation_loss"] < whole[0]["loss"] - 2
