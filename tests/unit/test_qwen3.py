"""Qwen3 against transformers' on the same weights: sizes, logits, gradients, files and text; and what is refused."""

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.stored_models import VOCAB, hold
from tests.tiny_models import QWEN3, TINY_QWEN3
from tests.tiny_runs import read_records, tiny_config, train_here
from torchtitan.__main__ import main
from torchtitan.checkpoint.storage import Storage
from torchtitan.config.schema import Model
from torchtitan.models.families import as_section, find_model, find_spec
from torchtitan.models.qwen3.args import FLAVORS, Qwen3Args
from torchtitan.models.qwen3.hf import from_hf_config, to_hf_config, to_hf_name
from torchtitan.models.qwen3.model import Transformer
from torchtitan.models.spec import Blueprint
from torchtitan.refusal import Refusal
from torchtitan.verbs.generate import Sampling, build_model, generate
from torchtitan.weights.checkpoint import save_checkpoint
from torchtitan.weights.stored import open_model
from torchtitan.weights.tensors import Weights

ROOT = Path(__file__).parents[2]
TOKENIZER = ROOT / "tests/assets/tokenizer"
FAMILY = "tests.tiny_models:QWEN3"

TINY = replace(TINY_QWEN3, vocab_size=97)
SHAPES = {
    "grouped queries": TINY,
    "plain heads": replace(TINY, n_kv_heads=8, head_dim=8),  # dim / n_heads
    "one KV head": replace(TINY, n_kv_heads=1, head_dim=32),
    "tied embeddings": replace(TINY, tied_embeddings=True),
}
PARAMETER_COUNTS = {
    "0.6B": 596_049_920,
    "1.7B": 1_720_574_976,
    "4B": 4_022_468_096,
    "8B": 8_190_735_360,
    "14B": 14_768_307_200,
    "32B": 32_762_123_264,
}


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def random_model(args: Qwen3Args) -> Transformer:
    torch.manual_seed(0)
    model = Transformer(args)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(1.0 if parameter.ndim == 1 else 0.0, 0.1)
    return model


def transformers_config(args: Qwen3Args) -> Any:
    """Said by hand, not by our own to_hf_config."""
    transformers = pytest.importorskip("transformers")
    return transformers.Qwen3Config(
        hidden_size=args.dim,
        num_hidden_layers=args.n_layers,
        num_attention_heads=args.n_heads,
        num_key_value_heads=args.n_kv_heads,
        head_dim=args.head_dim,
        intermediate_size=args.hidden_dim,
        vocab_size=args.vocab_size,
        rms_norm_eps=args.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": args.rope_theta},
        tie_word_embeddings=args.tied_embeddings,
        max_position_embeddings=args.max_seq_len,
    )


def transformers_twin(model: Transformer) -> nn.Module:
    from transformers import Qwen3ForCausalLM

    twin = Qwen3ForCausalLM(transformers_config(model.args))
    twin.load_state_dict({to_hf_name(name): value for name, value in model.state_dict().items()})
    return twin


@pytest.mark.parametrize("flavor", PARAMETER_COUNTS)
def test_published_models_have_their_parameter_counts(flavor: str) -> None:
    blueprint = find_model(Model(name="qwen3", flavor=flavor))
    with torch.device("meta"):
        theirs = pytest.importorskip("transformers").Qwen3ForCausalLM(transformers_config(blueprint.shape))
        ours = blueprint.spec.build(blueprint.shape)
    counts = [sum(p.numel() for p in model.parameters()) for model in (ours, theirs)]
    assert counts == [PARAMETER_COUNTS[flavor]] * 2
    assert blueprint.num_parameters == PARAMETER_COUNTS[flavor]
    for part in blueprint.parts():
        assert part.parameters == sum(p.numel() for p in ours.get_submodule(part.name).parameters()), part.name


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_and_gradients_equal_those_of_transformers(shape: str) -> None:
    pytest.importorskip("transformers")
    model = random_model(SHAPES[shape])
    twin = transformers_twin(model)
    tokens = torch.randint(TINY.vocab_size or 0, (2, 64), generator=torch.Generator().manual_seed(1))
    ours, theirs = model(tokens), twin(tokens).logits
    assert (ours - theirs).abs().max() <= 1e-4
    for logits in (ours, theirs):
        F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
    expected = {name: parameter.grad for name, parameter in twin.named_parameters()}
    gradients = {to_hf_name(name): parameter.grad for name, parameter in model.named_parameters()}
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        assert gradient is not None and gradient.abs().max() > 0, name
        assert (gradient - expected[name]).abs().max() <= 1e-4, name


@pytest.mark.parametrize("flavor", ["debugmodel", "0.6B"])
def test_first_values_give_a_loss_as_of_guessing(flavor: str) -> None:
    args = replace(FLAVORS[flavor], vocab_size=VOCAB, n_layers=2)
    blueprint = find_model(Model(name="qwen3", flavor=flavor))
    model = Transformer(args)
    for name, parameter in model.named_parameters():
        blueprint.spec.initialize(name, parameter.data, args, torch.Generator().manual_seed(len(name)))
    tokens = torch.randint(VOCAB, (4, 64))
    loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(-1, 1).flatten())
    assert loss.item() == pytest.approx(torch.tensor(VOCAB).log().item(), rel=0.12)


# Files: a run's checkpoint, Hugging Face's folder.


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


@pytest.mark.parametrize("flavor", PARAMETER_COUNTS)
def test_config_json_says_all_there_is_of_a_shape(flavor: str) -> None:
    args = FLAVORS[flavor]
    assert from_hf_config(to_hf_config(args, "bfloat16", 151643, 151645)) == args
    assert from_hf_config(transformers_config(args).to_dict()) == args  # in the form of transformers 5


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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head_dim": 15}, "model.head_dim = 15 is odd"),
        ({"n_kv_heads": 3}, "model.n_kv_heads = 3 does not divide n_heads = 8"),
    ],
)
def test_a_shape_that_cannot_be_is_refused(changes: dict[str, int], message: str) -> None:
    with pytest.raises(Refusal, match=message):
        replace(TINY, **changes)


def test_a_degree_that_splits_no_heads_is_refused_with_those_that_do() -> None:
    config = tiny_config("unused", 8, parallelism__tensor_parallel_degree=8)
    (refusal,) = find_spec("qwen3").refusals(TINY, config)
    assert "tensor_parallel_degree = 8 does not divide the model's 4 KV heads; use one of 1, 2, 4" in refusal


def test_llamas_scaled_rotation_is_no_key_of_qwen3() -> None:
    with pytest.raises(Refusal, match="qwen3 has no rope_scaling; remove it"):
        find_model(Model.model_validate({"name": "qwen3", "flavor": "0.6B", "rope_scaling": {"factor": 8.0}}))


# Runs


@pytest.mark.parametrize("flavor", QWEN3.flavors)
@pytest.mark.parametrize("optimizer", ["AdamW", "Muon"])
def test_a_run_learns(flavor: str, optimizer: str, tmp_path: Path) -> None:
    config = tiny_config(tmp_path, model__name=FAMILY, model__flavor=flavor, optimizer__name=optimizer)
    records = train_here(config)
    assert records == read_records(tmp_path)
    assert records[-1]["loss"] < records[0]["loss"] - 0.3


def test_only_matrices_of_layers_take_muon() -> None:
    spec = find_spec("qwen3")
    taken = {name for name, p in Transformer(TINY).named_parameters() if p.ndim == 2 and spec.takes_muon(name)}
    assert {name.split(".", 2)[2] for name in taken} == {
        *(f"attention.{name}.weight" for name in ("wq", "wk", "wv", "wo")),
        *(f"feed_forward.{name}.weight" for name in ("w1", "w2", "w3")),
    }


@pytest.mark.parametrize("config", ["qwen3_0.6b.toml", "qwen3_8b.toml"])
def test_a_shipped_configuration_is_checked_without_torch(config: str) -> None:
    code = (
        "import runpy, sys\n"
        f"sys.argv = ['torchtitan', 'check', 'train_configs/{config}', '--world_size', '8']\n"
        "runpy.run_module('torchtitan', run_name='__main__')\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "no mistake" in done.stdout, done.stderr
