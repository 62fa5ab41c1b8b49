"""Generated text against transformers', sampling, batches; and eval against the training's own validation."""

import io
import json
import math
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tests.stored_models import SHAPES, store_run
from tests.tiny_runs import tiny_config, train_here
from torchtitan.__main__ import main
from torchtitan.data.tokenizers.tokenizer import build_tokenizer
from torchtitan.hardware import Place
from torchtitan.refusal import Refusal
from torchtitan.tools.text.perplexity import resolve
from torchtitan.tools.text.writer import build_model, check_tensor_parallel
from torchtitan.training import run as run_module
from torchtitan.training.data import holds_out
from torchtitan.training.scores.generation import Sampling, generate, pick, stop_ids
from torchtitan.weights.stored import open_model

ROOT = Path(__file__).parents[3]
ALONE = Place(0, 0, 1)
PROMPTS = [[0, 5, 900, 31], [0, 77], [0, *range(100, 140)]]


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def model_of(folder: Path) -> nn.Module:
    return build_model(open_model(str(folder)), torch.float32, torch.device("cpu"))


def new_tokens(model: nn.Module, prompts: list[list[int]], **keys: Any) -> list[list[int]]:
    sampling = Sampling(**{k: keys.pop(k) for k in list(keys) if k in Sampling.__dataclass_fields__})
    stop, most = keys.get("stop", set()), keys.get("max_new_tokens", 40)
    rounds = list(generate(model, 1000, prompts, stop, most, sampling))
    return [[token for token in row if token is not None] for row in zip(*rounds, strict=True)]


@pytest.mark.parametrize("flavor", SHAPES)
def test_greedy_tokens_equal_those_of_transformers(flavor: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    run = store_run(tmp_path / "run", flavor)
    main(["convert", str(run), str(tmp_path / "hf")])
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    ours = model_of(run)
    for prompt in PROMPTS:
        expected = theirs.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=40)
        assert new_tokens(ours, [prompt], stop={1})[0] == expected[0, len(prompt) :].tolist()


def test_prompts_of_unlike_length_together_give_what_each_gives_alone(tmp_path: Path) -> None:
    model = model_of(store_run(tmp_path / "run"))
    alone = [new_tokens(model, [prompt])[0] for prompt in PROMPTS]
    assert new_tokens(model, PROMPTS) == alone
    assert len({tuple(tokens) for tokens in alone}) == len(PROMPTS)


def test_keys_kept_from_a_long_prompt_in_pieces_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(store_run(tmp_path / "run"))
    whole = new_tokens(model, PROMPTS)
    monkeypatch.setattr("torchtitan.training.scores.generation._PREFILL", 7)
    assert new_tokens(model, PROMPTS) == whole


def test_each_text_ends_at_its_own_stop_token(tmp_path: Path) -> None:
    model = model_of(store_run(tmp_path / "run"))
    free = new_tokens(model, PROMPTS)
    first, last = free[0][3], free[1][9]
    ended = new_tokens(model, PROMPTS, stop={first, last})
    for whole, cut in zip(free, ended, strict=True):
        places = [i for i, token in enumerate(whole) if token in (first, last)]
        assert cut == whole[: places[0] + 1 if places else None]
    assert len(ended[0]) <= 4 and len(ended[1]) <= 10


def test_a_seed_draws_the_same_again_and_another_something_else(tmp_path: Path) -> None:
    model = model_of(store_run(tmp_path / "run"))
    drawn = [new_tokens(model, PROMPTS, temperature=2.0, seed=seed) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    twice = new_tokens(model, [PROMPTS[0]] * 2, temperature=2.0, seed=1)
    assert twice[0] == drawn[0][0] and twice[0] != twice[1]
    assert new_tokens(model, PROMPTS, temperature=2.0, top_k=1, seed=5) == new_tokens(model, PROMPTS)


def test_tokens_are_drawn_as_often_as_their_share_says() -> None:
    shares = torch.tensor([0.1, 0.4, 0.05, 0.3, 0.15])
    generator = [torch.Generator().manual_seed(0)]

    def frequencies(**keys: Any) -> list[float]:
        drawn = [pick(shares.log()[None], Sampling(**keys), generator).item() for _ in range(3000)]
        return [drawn.count(token) / 3000 for token in range(5)]

    assert frequencies(temperature=1.0) == pytest.approx(shares.tolist(), abs=0.03)
    squares = shares.square() / shares.square().sum()
    assert frequencies(temperature=0.5) == pytest.approx(squares.tolist(), abs=0.03)
    assert frequencies(temperature=1.0, top_k=2) == pytest.approx([0, 4 / 7, 0, 3 / 7, 0], abs=0.03)
    assert frequencies(temperature=1.0, top_p=0.75) == pytest.approx([0, 8 / 17, 0, 6 / 17, 3 / 17], abs=0.03)
    assert frequencies(temperature=1.0, top_p=0.1) == [0, 1, 0, 0, 0]


def test_text_ends_also_at_what_generation_config_names(tmp_path: Path) -> None:
    tokenizer = build_tokenizer("tests/assets/tokenizer")
    assert stop_ids(tmp_path, tokenizer) == {1}
    for named, expected in [([7, 9], {1, 7, 9}), (8, {1, 8}), (None, {1})]:
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": named}))
        assert stop_ids(tmp_path, tokenizer) == expected


def test_the_verb_prints_prompt_and_continuation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = store_run(tmp_path / "run", training__mixed_precision_param="float32")

    def printed(*words: str) -> str:
        main(["generate", "--checkpoint", str(run), "--max_new_tokens", "12", "--temperature", "0", *words])
        return capsys.readouterr().out

    first, second = printed("--prompt", "The module"), printed("--prompt", "x = 1")
    tokenizer = build_tokenizer("tests/assets/tokenizer")
    prompt = tokenizer.encode_prompt("The module")
    tokens = new_tokens(model_of(run), [prompt], stop={1}, max_new_tokens=12)[0]
    assert first == tokenizer.decode(prompt + tokens) + "\n" and first.startswith("The module")
    assert printed("--prompt", "The module", "x = 1") == f"{first}\n{second}"
    drawing = ["--prompt", "x", "--temperature", "1.5", "--seed", "4"]
    assert printed(*drawing) == printed(*drawing)
    assert printed(*drawing[:-2]) != printed(*drawing[:-2])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--top_p", "0"], "--top_p above 0"),
        (["--max_new_tokens", "200000"], "131072 or less together"),
    ],
)
def test_what_cannot_be_generated_is_refused(words: list[str], message: str, tmp_path: Path) -> None:
    run = store_run(tmp_path / "run")
    with pytest.raises(SystemExit, match=f"error: .*{message}"):
        main(["generate", "--checkpoint", str(run), "--prompt", "a", *words])


def test_ranks_that_do_not_divide_the_heads_are_refused(tmp_path: Path) -> None:
    source = open_model(str(store_run(tmp_path / "run")))
    config = source.plain_config("unused", source.assets, degree=3)
    with pytest.raises(Refusal, match="= 3 does not divide the model's 8 heads; use one of 1, 2, 4"):
        check_tensor_parallel(source.blueprint, config)


def evaluated(capsys: pytest.CaptureFixture[str], folder: Path, *options: str) -> tuple[float, float, int]:
    capsys.readouterr()
    main(["eval", "--checkpoint", str(folder), "--", *options])
    found = re.search(r"loss (\S+), perplexity (\S+), (\S+) tokens\n$", capsys.readouterr().out)
    assert found
    return float(found[1]), float(found[2]), int(found[3].replace(",", ""))


def test_eval_measures_what_the_training_did(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, build_parts = [], run_module.build_model
    monkeypatch.setattr(run_module, "build_model", lambda *args: kept.append(build_parts(*args)) or kept[-1])
    keys = {"validation__enable": True, "validation__dataset_path": "tests/assets/pydocs/validation.jsonl",
            "validation__seq_len": 64, "validation__steps": 4, "training__steps": 3}  # fmt: skip
    train_here(tiny_config(tmp_path / "trained", **keys))
    monkeypatch.undo()
    monkeypatch.chdir(ROOT)
    recorded = json.loads((tmp_path / "trained/validation.jsonl").read_text().splitlines()[-1])

    weights = {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach() for name, p in kept[0].named_parameters()
    }
    run = store_run(tmp_path / "run", weights=weights, **keys)
    loss, perplexity, tokens = evaluated(capsys, run)
    assert loss == pytest.approx(recorded["validation_loss"], abs=1e-6)
    assert perplexity == pytest.approx(torch.tensor(loss).exp().item(), rel=1e-4)
    assert tokens == recorded["validation_tokens"] == 4 * 8 * 64

    main(["convert", str(run), str(tmp_path / "hf")])
    options = ["--training.mixed_precision_param", "float32", "--activation_checkpoint.mode", "none"]
    options += ["--validation.dataset_path", keys["validation__dataset_path"], "--validation.seq_len", "64"]
    assert evaluated(capsys, tmp_path / "hf", *options, "--validation.steps", "4")[0] == pytest.approx(loss, abs=1e-6)
    assert evaluated(capsys, tmp_path / "hf", *options)[2] > tokens


def test_eval_reads_a_part_of_the_training_text_only_if_the_run_held_it_out(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("a text\n" * 100)
    keys = {"training__dataset_path": str(tmp_path / "mine.txt"), "validation__dataset": "pydocs_validation"}
    held_out = open_model(str(store_run(tmp_path / "a", validation__enable=True, **keys)))
    all_trained = open_model(str(store_run(tmp_path / "b", **keys)))
    named = ["--validation.dataset", "pydocs_validation"]
    for source, options, is_part in ((held_out, [], True), (held_out, named, False), (all_trained, [], False)):
        config, _ = resolve(source, options, ALONE)
        assert holds_out(config) is is_part
        assert str(config.validation.dataset_path).endswith("pydocs/validation.jsonl") is not is_part


def test_eval_takes_a_run_whose_optimizer_would_need_its_ranks(tmp_path: Path) -> None:
    keys = {"optimizer__early_step_in_backward": True, "training__max_norm": math.inf}
    run = store_run(tmp_path / "run", **keys)
    options = ["--training.global_batch_size", "64"]  # eight ranks' batch
    config, _ = resolve(open_model(str(run)), options, ALONE)
    assert config.training.global_batch_size == 64 and config.validation.enable


def test_eval_takes_the_batches_that_the_runs_own_ranks_made(tmp_path: Path) -> None:
    """A batch of -1 grows with the ranks; those of eval may be fewer or more."""
    run = store_run(tmp_path / "run", training__global_batch_size=-1, training__local_batch_size=6)
    source = open_model(str(run))
    assert source.place is not None
    storage, manifest = source.place
    source = replace(source, place=(storage, replace(manifest, layout="pp 2 x dp_replicate 2 x dp_shard 4")))
    split = ["--parallelism.tensor_parallel_degree=2"]
    for world_size, options, local_batch_size in ((1, [], 6), (8, [], 6), (16, [], 3), (16, split, 6)):
        training = resolve(source, options, Place(0, 0, world_size))[0].training
        assert (training.global_batch_size, training.num_streams) == (48, 48)
        assert training.local_batch_size == local_batch_size


def test_eval_refuses_a_configuration_of_another_model(tmp_path: Path) -> None:
    run = store_run(tmp_path / "run")
    with pytest.raises(SystemExit, match="its rope_theta 10000.0, this run's 500000.0; its tied.*say otherwise$"):
        main(["eval", "--checkpoint", str(run), "--", "--model.flavor", "tiny-tied", "--validation.seq_len", "64",
              "--validation.dataset_path", "tests/assets/pydocs/validation.jsonl"])  # fmt: skip


def test_a_conversation_goes_on_where_the_user_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["generate", "--checkpoint", str(store_run(tmp_path / "run")), "--max_new_tokens", "3", "--seed", "1"]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sys, "stdin", io.StringIO("The module\nand more\n\nanew\n"))
        main(options)
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("Type the beginning of a text.") and len(said) >= 4
    main([*options, "--prompt", "The module", "--temperature", "0.8"])
    first = capsys.readouterr().out
    main([*options, "--prompt", "anew", "--temperature", "0.8"])
    assert first.startswith("The module") and capsys.readouterr().out.removeprefix("anew") in "\n".join(said) + "\n"
