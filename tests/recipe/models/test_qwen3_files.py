"""Qwen3's files: a run's checkpoint, Hugging Face's folder and config.json, and the text that both write."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.stored_models import VOCAB, hold
from tests.tiny_models import QWEN3, TINY_QWEN3
from tests.tiny_runs import tiny_config
from torchtitan.__main__ import main
from torchtitan.checkpoint.storage import Storage
from torchtitan.models.families import find_model, find_spec
from torchtitan.models.qwen3.args import FLAVORS, Qwen3Args
from torchtitan.models.qwen3.hf import from_hf_config, to_hf_config, to_hf_name
from torchtitan.models.qwen3.model import Transformer
from torchtitan.models.spec import Blueprint
from torchtitan.refusal import Refusal
from torchtitan.tools.text.writer import Sampling, build_model, generate
from torchtitan.weights.checkpoint import save_checkpoint
from torchtitan.weights.stored import as_section, open_model
from torchtitan.weights.tensors import Weights

ROOT = Path(__file__).parents[3]
TOKENIZER = ROOT / "tests/assets/tokenizer"
FAMILY = "tests.tiny_models:QWEN3"

TINY = replace(TINY_QWEN3, vocab_size=97)


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def random_weights(args: Qwen3Args) -> dict[str, Tensor]:
    """Larger than a beginning model's, so that its likeliest tokens are far apart."""
    torch.manual_seed(0)
    return {
        name: (1 + 0.1 * torch.randn_like(p)) if p.ndim == 1 else 0.15 * torch.randn_like(p)
        for name, p in Transformer(replace(args, vocab_size=VOCAB)).named_parameters()
    }


def store_run(folder: Path, flavor: str) -> Path:
    """A run folder whose checkpoint of step 0 holds random weights."""
    weights = hold(random_weights(QWEN3.flavors[flavor]))
    config = tiny_config(folder, model__name=FAMILY, model__flavor=flavor)
    save_checkpoint(weights, Storage(f"{folder}/checkpoint"), config.model_dump(mode="json"), None)
    return folder


def contents(weights: Weights) -> dict[str, Tensor]:
    return {name: weights.read(name) for name in weights.outline}


def same(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(a[n].dtype == b[n].dtype and torch.equal(a[n], b[n]) for n in a)


def convert(*words: Any) -> None:
    main(["convert", *map(str, words)])


@pytest.mark.parametrize("flavor", QWEN3.flavors)
def test_there_and_back_nothing_has_changed(flavor: str, tmp_path: Path) -> None:
    run = store_run(tmp_path / "run", flavor)
    convert(run, tmp_path / "hf", "--shard_gb", 0.0003)
    convert(tmp_path / "hf", tmp_path / "back")
    before, after = open_model(str(run)), open_model(str(tmp_path / "back"))
    assert after.family == "qwen3"  # by config.json's model_type
    assert same(contents(before.weights), contents(after.weights))
    assert before.blueprint.shape == after.blueprint.shape

    convert(tmp_path / "back", tmp_path / "again", "--shard_gb", 0.0003)
    files = sorted(path.name for path in (tmp_path / "hf").iterdir())
    assert files == sorted(path.name for path in (tmp_path / "again").iterdir())
    assert len([name for name in files if name.endswith(".safetensors")]) > 2
    for name in files:
        assert (tmp_path / "hf" / name).read_bytes() == (tmp_path / "again" / name).read_bytes(), name


@pytest.mark.parametrize("flavor", QWEN3.flavors)
def test_transformers_loads_the_export_and_what_it_saves_is_read(flavor: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    run = store_run(tmp_path / "run", flavor)
    convert(run, tmp_path / "hf")
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    stored = open_model(str(run))
    ours = Transformer(stored.blueprint.shape)
    ours.load_state_dict(contents(stored.weights), strict=flavor != "tiny-tied")
    tokens = torch.randint(VOCAB, (2, 64))
    with torch.no_grad():
        expected = theirs(tokens).logits
        assert (ours(tokens) - expected).abs().max() <= 1e-5 * expected.abs().max()

    theirs.save_pretrained(tmp_path / "saved", max_shard_size="300KB")
    shutil.copy(TOKENIZER / "tokenizer.json", tmp_path / "saved")
    saved = open_model(str(tmp_path / "saved"))
    assert saved.blueprint.shape == stored.blueprint.shape
    assert same(contents(saved.weights), random_weights(QWEN3.flavors[flavor]))


def test_a_tied_output_that_is_stored_as_well_is_read_once(tmp_path: Path) -> None:
    """As the published 0.6B is: 751,632,384 numbers for 596,049,920 parameters."""
    convert(store_run(tmp_path / "run", "tiny-tied"), tmp_path / "hf")
    stored = load_file(tmp_path / "hf/model.safetensors")
    embedding = stored["model.embed_tokens.weight"]
    save_file(stored | {"lm_head.weight": embedding.clone()}, tmp_path / "hf/model.safetensors")
    assert same(contents(open_model(str(tmp_path / "hf")).weights), random_weights(QWEN3.flavors["tiny-tied"]))
    save_file(stored | {"lm_head.weight": embedding + 1}, tmp_path / "hf/model.safetensors")
    with pytest.raises(Refusal, match="lm_head.weight differs from model.embed_tokens.weight; set tie_word_embeddings"):
        open_model(str(tmp_path / "hf"))


@pytest.mark.parametrize("flavor", QWEN3.flavors)
def test_greedy_text_equals_that_of_transformers(flavor: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    convert(store_run(tmp_path / "run", flavor), tmp_path / "hf")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    source = open_model(str(tmp_path / "hf"))
    model = build_model(source, torch.float32, torch.device("cpu"))
    prompts = [[0, 5, 900, 31], [0, 77], [0, *range(100, 140)]]  # the shorter ones are padded
    steps = list(generate(model, source.blueprint.shape.max_seq_len, prompts, set(), 30, Sampling()))
    for row, prompt in enumerate(prompts):
        tokens = torch.tensor([prompt])
        written = theirs.generate(tokens, attention_mask=torch.ones_like(tokens), do_sample=False, max_new_tokens=30,
                                  min_new_tokens=30, eos_token_id=None, pad_token_id=0)  # fmt: skip
        assert [step[row] for step in steps] == written[0, len(prompt) :].tolist()


# config.json


@pytest.mark.parametrize("flavor", [name for name in FLAVORS if name != "debugmodel"])
def test_config_json_says_all_there_is_of_a_shape(flavor: str) -> None:
    args = FLAVORS[flavor]
    config = to_hf_config(args, "bfloat16", 151643, 151645)
    assert from_hf_config(config) == args
    of_transformers = pytest.importorskip("transformers").Qwen3Config(**config).to_dict()
    assert "rope_theta" not in of_transformers  # but in rope_parameters, as transformers 5 has it
    assert from_hf_config(of_transformers) == args


def test_config_json_as_published_is_the_flavor() -> None:
    published = """{"architectures": ["Qwen3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
        "bos_token_id": 151643, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 1024,
        "initializer_range": 0.02, "intermediate_size": 3072, "max_position_embeddings": 40960,
        "max_window_layers": 28, "model_type": "qwen3", "num_attention_heads": 16, "num_hidden_layers": 28,
        "num_key_value_heads": 8, "rms_norm_eps": 1e-06, "rope_scaling": null, "rope_theta": 1000000,
        "sliding_window": null, "tie_word_embeddings": true, "torch_dtype": "bfloat16", "use_cache": true,
        "use_sliding_window": false, "vocab_size": 151936}"""
    assert from_hf_config(json.loads(published)) == FLAVORS["0.6B"]


def test_a_flavor_of_another_length_keeps_its_length() -> None:
    """As of the published base models, whose config.json is the chat models' except for 32768 positions."""
    shape = replace(FLAVORS["0.6B"], max_seq_len=32768)
    section = as_section("qwen3", Blueprint("", find_spec("qwen3"), shape), "unused")
    assert section.flavor == "0.6B" and find_model(section).shape == shape


def test_a_model_that_ours_cannot_be_is_refused_with_all_its_reasons() -> None:
    config = to_hf_config(TINY, "float32", 0, 1)
    config |= {"hidden_act": "gelu", "attention_bias": True, "use_sliding_window": True, "sliding_window": 4096}
    config |= {"layer_types": ["full_attention", "sliding_attention"], "head_dim": None}
    config |= {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}}
    with pytest.raises(Refusal) as refused:
        from_hf_config(config)
    for finding in (
        "hidden_act = 'gelu', must be 'silu'",
        "attention_bias = True, must be False",
        "use_sliding_window = True, must be False",
        "layers of the type 'sliding_attention'",
        "no head_dim",
        "rotation of the type 'yarn'",
    ):
        assert finding in str(refused.value)
    with pytest.raises(Refusal, match="model_type = 'llama', must be 'qwen3'"):
        from_hf_config(to_hf_config(TINY, "float32", 0, 1) | {"model_type": "llama"})


def test_a_window_that_is_not_in_use_is_no_reason_to_refuse() -> None:
    assert from_hf_config(to_hf_config(TINY, "float32", 0, 1) | {"sliding_window": 4096}) == TINY


def test_a_weight_without_a_name_in_hugging_face_is_refused() -> None:
    with pytest.raises(Refusal, match="layers.0.attention.gate.weight has no name in Hugging Face's Qwen3"):
        to_hf_name("layers.0.attention.gate.weight")
