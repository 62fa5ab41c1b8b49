"""Qwen3 against transformers' on the same weights: sizes, logits, gradients; refusals; and runs that learn."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.stored_models import VOCAB
from tests.tiny_models import QWEN3, TINY_QWEN3
from tests.tiny_runs import read_records, tiny_config, train_here
from torchtitan.config.schema import Model
from torchtitan.models.families import find_model, find_spec
from torchtitan.models.qwen3.args import FLAVORS, Qwen3Args
from torchtitan.models.qwen3.hf import to_hf_name
from torchtitan.models.qwen3.model import Transformer
from torchtitan.refusal import Refusal

ROOT = Path(__file__).parents[3]
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
        f"sys.argv = ['torchtitan', 'check', 'train_configs/{config}', '--world_size', '8', '--']\n"
        "sys.argv += ['--model.hf_assets_path', 'tests/assets/tokenizer']\n"  # nothing is downloaded here
        "runpy.run_module('torchtitan', run_name='__main__')\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "no mistake" in done.stdout, done.stderr
