"""Scores beside lm_eval's own for the exported model, on every layout, and during training without a trace."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from asked import CHATS, CHOICES, PERPLEXITY, TEMPLATE, WRITTEN, evaluated, on_a_layout, train, write_own_task

from tests.ranks import Ranks
from tests.stored_models import store_run
from tests.tiny_runs import read_records, tiny_config, train_here
from torchtitan.__main__ import main
from torchtitan.config.load import ConfigError
from torchtitan.hardware import Place
from torchtitan.models.families import plan_model
from torchtitan.refusal import Refusal
from torchtitan.training.scores.during import check_tasks
from torchtitan.training.scores.harness import Asked, figures
from torchtitan.training.scores.tasks import open_tasks

lm_eval = pytest.importorskip("lm_eval")
ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    keys = {"model__chat_template": TEMPLATE, "training__mixed_precision_param": "float32"}
    return store_run(tmp_path_factory.mktemp("stored") / "run", metrics__enable_tensorboard=True, **keys)


@pytest.fixture(scope="module")
def own(stored: Path) -> str:
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(ROOT)
        return write_own_task(stored, stored.parent)


def test_figures_are_those_of_lm_eval_with_the_exported_model(stored: Path, own: str, tmp_path: Path) -> None:
    main(["convert", str(stored), str(tmp_path / "hf")])
    file = tmp_path / "hf/tokenizer_config.json"
    template = {"chat_template": (ROOT / TEMPLATE).read_text()}
    file.write_text(json.dumps(json.loads(file.read_text()) | template))
    from lm_eval.models.huggingface import HFLM

    theirs = HFLM(str(tmp_path / "hf"), dtype="float32", batch_size=7, device="cpu")
    for tasks, shots, words in (
        ([CHOICES, own, PERPLEXITY], None, []),
        ([CHOICES], 2, ["--chat", "--num_fewshot", "2"]),
    ):
        found = lm_eval.simple_evaluate(
            theirs, tasks=tasks, limit=20, num_fewshot=shots, apply_chat_template=bool(shots), bootstrap_iters=0
        )
        ours = evaluated(stored, tasks, "--limit", "20", *words)
        assert ours == pytest.approx(figures(found), rel=1e-5) and len(ours) in (2, 5)
        assert ours.get("own/exact_match", 1) > 0.9


LAYOUTS = {
    "data_parallel_shard_degree": True,
    "tensor_parallel_degree": True,
    "pipeline_parallel_degree": False,  # no rank can write
    "context_parallel_degree": False,
}


@pytest.mark.parametrize(("key", "writes"), LAYOUTS.items())
def test_every_layout_finds_the_figures_of_one_process(
    key: str, writes: bool, stored: Path, own: str, ranks: Ranks
) -> None:
    tasks = [CHOICES, PERPLEXITY, *([own] if writes else [])]
    alone = evaluated(stored, tasks, "--limit", "20")
    apart = ["--model.attn_mask_type", "block_causal"]  # as a run on conversations has it
    split = ["--", f"--parallelism.{key}", "2", *apart]
    on_two, _ = ranks(on_a_layout, 2, stored, tasks, ["--limit", "20", *split])
    assert on_two == pytest.approx(alone, rel=1e-5) and on_two.get("own/exact_match", 1) > 0.9


def test_tasks_in_a_run_change_nothing_of_it_and_are_metrics(tmp_path: Path) -> None:
    keys = CHATS | {"training__steps": 4, "validation__freq": 2, "checkpoint__enable": True}
    own = {"validation__tasks": [CHOICES, WRITTEN], "validation__tasks_limit": 10}
    best = {"checkpoint__keep_best": "choices/acc"}
    average = {"optimizer__average_decay": 0.5}
    plain = train_here(tiny_config(tmp_path / "plain", **keys, **average))
    scored = train_here(tiny_config(tmp_path / "scored", **keys, **own, **best, **average))
    assert [(r["loss"], r["grad_norm"]) for r in plain] == [(r["loss"], r["grad_norm"]) for r in scored]
    records = read_records(tmp_path / "scored", "validation.jsonl")
    bare = [{name: value for name, value in record.items() if "/" not in name} for record in records]
    assert bare == read_records(tmp_path / "plain", "validation.jsonl")
    last = evaluated(tmp_path / "scored", [CHOICES, WRITTEN], "--limit", "10", "--chat")  # the averaged weights, too
    assert last == {name: value for name, value in records[-1].items() if "/" in name} and len(last) == 3
    kept = json.loads((tmp_path / "scored/scores/step-4.json").read_text())
    assert figures(kept) == last and not list((tmp_path / "plain").glob("scores"))


@pytest.mark.parametrize("layout", [{"tensor_parallel_degree": 2}, {"data_parallel_shard_degree": 2}])
def test_ranks_train_on_as_if_no_task_had_been_asked(layout: dict[str, int], tmp_path: Path, ranks: Ranks) -> None:
    keys = CHATS | {"training__steps": 2, "validation__freq": 1, "training__local_batch_size": 4}
    cut = as_task(
        tmp_path, ("max_gen_toks: 16", "max_gen_toks: 55")
    )  # leaves room for 9 tokens, which no 2 ranks share
    keys |= {"model__max_seq_len": 64, "training__seq_len": 64, "validation__seq_len": 64}
    keys |= {f"parallelism__{name}": degree for name, degree in layout.items()}
    own = {"validation__tasks": [CHOICES, cut], "validation__tasks_limit": 4, "validation__steps": 1}
    plain, _ = ranks(train, 2, str(tmp_path / "plain"), keys | {"validation__steps": 1})
    scored, _ = ranks(train, 2, str(tmp_path / "scored"), keys | own)
    assert [(r["loss"], r["grad_norm"]) for r in plain] == [(r["loss"], r["grad_norm"]) for r in scored]
    one = {name: value for name, value in keys.items() if not name.startswith("parallelism")} | {"validation__freq": 2}
    alone = train_here(tiny_config(tmp_path / "alone", **one | {"training__local_batch_size": 8}, **own))
    split, whole = (read_records(tmp_path / name, "validation.jsonl")[-1] for name in ("scored", "alone"))
    assert len(alone) == 2 and split == pytest.approx(whole, rel=1e-3)


def as_task(folder: Path, *changes: tuple[str, str], of: str = WRITTEN) -> str:
    text = Path(of).read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    (folder / "task.yaml").write_text(text)
    return str(folder / "task.yaml")


@pytest.mark.parametrize(
    ("changes", "degree", "message"),
    [
        ([("max_gen_toks: 16", "num_beams: 4")], 1, "the task written searches with num_beams = 4; only one is"),
        ([("max_gen_toks: 16", "min_p: 0.1")], 1, r"the task written sets min_p = 0.1 in generation_kwargs, which"),
        ([("max_gen_toks: 16", "max_gen_toks: 200000")], 1, "lets the model write 200000 tokens, and it can see 131"),
        ([("doc_to_text:", "unsafe_code: true\ndoc_to_text:")], 1, "the task written runs programs that the model"),
        ([], 2, "lets the model write, and with a pipeline or context parallelism no rank has a whole sequence"),
        ([("questions.jsonl", "none.jsonl")], 1, "the tasks cannot be loaded .* the same HF_HOME: python -c .*load"),
    ],
)
def test_a_task_that_cannot_be_answered_is_refused(
    changes: list[tuple[str, str]], degree: int, message: str, tmp_path: Path
) -> None:
    own = {"validation__enable": True, "validation__tasks": [as_task(tmp_path, *changes)]}
    config = tiny_config(tmp_path, degree, parallelism__context_parallel_degree=degree, **own)
    with pytest.raises(Refusal, match=message):
        check_tasks(config, plan_model(config), Place(0, 0, degree))
    check_tasks(config, plan_model(config), Place(1, 1, degree + 1))  # only rank 0 reads the data


def test_an_answer_longer_than_the_model_sees_is_refused() -> None:
    with pytest.raises(Refusal, match="an answer of the task has 9 tokens, and the model sees 8; take another task"):
        Asked.score(SimpleNamespace(longest=8), [([1], [2] * 9)])  # type: ignore[arg-type]


def test_an_unknown_task_is_refused_with_the_nearest_name(monkeypatch: pytest.MonkeyPatch) -> None:
    import lm_eval.tasks

    everything = lm_eval.tasks.TaskManager  # looks through 14,000 files
    own = str(Path(CHOICES).parent)
    monkeypatch.setattr(lm_eval.tasks, "TaskManager", lambda **_: everything(include_path=own, include_defaults=False))
    with pytest.raises(Refusal, match="--tasks = 'choice' is no task of lm_eval and no file; did you mean 'choices'?"):
        open_tasks(("choice",), "--tasks")
    assert "choices" in open_tasks(("choices",), "--tasks")["tasks"]


def test_without_lm_eval_the_line_that_installs_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", None)
    with pytest.raises(Refusal, match="validation.tasks needs lm-evaluation-harness, .*; pip install lm-eval"):
        open_tasks(("anything",), "validation.tasks")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"validation__tasks": ["a"]}, "validation.tasks = .* without validation.enable"),
        ({"validation__tasks_limit": 3}, "validation.tasks_limit = 3 without validation.tasks"),
        ({"checkpoint__keep_best": "a/acc", "checkpoint__enable": True, "validation__enable": True}, "has no metrics"),
    ],
)
def test_keys_that_do_nothing_are_refused(keys: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_model(tiny_config(tmp_path, **keys))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--limit", "3"], "--limit is for tasks; give --tasks, too"),
        (["--tasks", "a", "--limit", "0"], "--num_fewshot is 0 or more, --limit 1 or more"),
    ],
)
def test_options_of_the_verb_that_do_nothing_are_refused(words: list[str], message: str, stored: Path) -> None:
    with pytest.raises(SystemExit, match=message):
        main(["eval", "--checkpoint", str(stored), *words])


def test_the_verb_writes_into_the_run_folder(stored: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["eval", "--checkpoint", f"{stored}/checkpoint/step-0", "--tasks", CHOICES, "--limit", "5"])
    (file,) = (stored / "scores").glob("step-0_*.json")
    kept = json.loads(file.read_text())
    assert kept["model"]["computed_in"] == "float32" and kept["model"]["limit"] == 5
    said = capsys.readouterr().out
    assert f"|choices|      1|none  |     0|acc     |↑  |{kept['results']['choices']['acc,none']:5.1f}" in said
    assert list((stored / "tb/scores").iterdir())
