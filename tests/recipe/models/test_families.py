"""From [model] to a model: families by name, module or file; shapes by flavor, by key and by config.json."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.tiny_models import TINY
from torchtitan.config.load import ConfigError, to_toml
from torchtitan.config.schema import Config, Model, RopeScaling
from torchtitan.models.families import find_model, find_spec, load_run
from torchtitan.models.llama.args import LLAMA3_FLAVORS, LlamaArgs
from torchtitan.models.llama.hf import to_hf_config
from torchtitan.models.llama.spec import LLAMA3
from torchtitan.models.spec import Blueprint
from torchtitan.refusal import Refusal
from torchtitan.weights.stored import as_section

SIZES = {"dim": 96, "n_layers": 3, "n_heads": 4, "n_kv_heads": 2, "hidden_dim": 256}


def test_keys_of_a_shape_override_the_flavor() -> None:
    shape = find_model(Model(flavor="8B", n_layers=2, tied_embeddings=True)).shape
    assert shape == replace(LLAMA3_FLAVORS["8B"], n_layers=2, tied_embeddings=True)


def test_a_complete_set_of_sizes_needs_no_flavor_and_takes_nothing_from_it() -> None:
    assert find_model(Model(**SIZES)).shape == LlamaArgs(**SIZES)
    assert find_model(Model(flavor="8B", **SIZES, head_dim=32)).shape == LlamaArgs(**SIZES, head_dim=32)
    assert "with the shape in [model]" in find_model(Model(**SIZES)).name


def test_config_json_of_a_download_is_a_shape(tmp_path: Path) -> None:
    shape = replace(TINY, vocab_size=2048, rope_scaling=RopeScaling())
    (tmp_path / "config.json").write_text(json.dumps(to_hf_config(shape, "float32", 0, 1)))
    model = Model(flavor="config.json", hf_assets_path=str(tmp_path))
    assert find_model(model).shape == shape
    assert find_model(model.model_copy(update={"n_layers": 2})).shape == replace(shape, n_layers=2)
    with pytest.raises(Refusal, match="elsewhere/config.json cannot be read .No such file or dir"):
        find_model(Model(flavor="config.json", hf_assets_path=str(tmp_path / "elsewhere")))


@pytest.mark.parametrize("shape", [LLAMA3_FLAVORS["1B"], replace(TINY, vocab_size=9, rope_scaling=RopeScaling())])
def test_a_shape_written_into_a_file_is_the_same_shape_again(shape: LlamaArgs, tmp_path: Path) -> None:
    section = as_section("llama3", Blueprint("", LLAMA3, shape), "tests/assets/tokenizer")
    file = tmp_path / "run.toml"
    file.write_text(to_toml(Config(model=section)))
    _, blueprint = load_run(["--job.config_file", str(file), "--training.seq_len", "64"], 1)
    assert blueprint.shape == shape


def test_a_family_comes_from_the_table_a_module_or_a_file(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("from torchtitan.models.llama.spec import LLAMA2 as SPEC\nOTHER = 1\n")
    assert find_spec("llama3") is find_spec("torchtitan.models.llama.spec:LLAMA3") is LLAMA3
    assert find_spec(f"{tmp_path}/mine.py:SPEC") is find_spec("llama2")


@pytest.mark.parametrize("name", ["beside.py:SPEC", "of_mine.nets.model:SPEC"])
def test_a_model_beside_the_toml_is_found_with_its_siblings(tmp_path: Path, name: str) -> None:
    package = tmp_path / "of_mine" / "nets"
    package.mkdir(parents=True)
    for folder in (package, package.parent):
        (folder / "__init__.py").touch()
    (tmp_path / "its_sibling.py").write_text("from torchtitan.models.llama.spec import LLAMA2\n")
    (tmp_path / "beside.py").write_text("from its_sibling import LLAMA2 as SPEC\n")
    (package.parent / "spec.py").write_text("from its_sibling import LLAMA2 as SPEC\n")
    (package / "model.py").write_text("from ..spec import SPEC\n")
    (tmp_path / "run.toml").write_text(f'[model]\nname = "{name}"\nflavor = "7B"\n')
    _, blueprint = load_run(["--job.config_file", str(tmp_path / "run.toml")], 1)
    assert blueprint.spec is find_spec("llama2")


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"name": "lama3"}, 'model.name = "lama3" is no family of this recipe; use one of llama3, llama2'),
        ({"name": "nowhere.py:SPEC"}, "there is no file /.*/nowhere.py; correct the path"),
        ({"name": "nowhere.at_all:SPEC"}, "Python finds no module nowhere.at_all; correct the name, or set PYTHONPATH"),
        ({"name": "tests.tiny_models:TINY"}, "tests.tiny_models has no ModelSpec called TINY; define TINY"),
        ({"name": "../../etc/passwd:X"}, "begins with a dot; name the file, as path/to/file.py:SPEC"),
        ({"name": "tests.tiny_models:GONE"}, "has no ModelSpec called GONE"),
        (
            {"flavor": "9B"},
            'model.flavor = "9B" is no flavor of llama3; use one of debugmodel, .*, or "config.json"',
        ),
        ({"n_heads": 7}, "model.dim = 256 with n_heads = 7: a head is dim / n_heads wide"),
        ({"n_kv_heads": 5}, "model.n_kv_heads = 5 does not divide n_heads = 16"),
        ({"head_dim": 15}, "model.head_dim = 15 is odd"),
        (
            {"rope_scaling": RopeScaling(low_freq_factor=4.0)},
            "low_freq_factor = 4.0 is not below high_freq_factor = 4.0",
        ),
        (
            {"name": "tests.recipe.models.own_family:SPEC", "flavor": "small", "rope_theta": 1.0},
            "has no rope_theta; remove it",
        ),
    ],
)
def test_a_model_that_cannot_be_is_refused(model: dict, message: str) -> None:
    with pytest.raises(Refusal, match=message):
        find_model(Model(**model))


def test_what_a_model_cannot_be_under_its_layout_is_listed_at_once() -> None:
    options = ["--parallelism.tensor_parallel_degree", "3", "--training.seq_len", "200000"]
    options += ["--training.global_batch_size", "8"]
    with pytest.raises(ConfigError) as caught:
        load_run(options, 3)
    assert len(caught.value.mistakes) == 2
    assert "does not divide the model's 16 heads; use one of 1, 2, 4, 8, 16" in caught.value.mistakes[0]
    assert "training.seq_len = 200000 is longer than llama3 debugmodel can be" in caught.value.mistakes[1]
