"""Weights to Hugging Face and back, from Meta's files, against transformers; and what is refused."""

import io
import json
import pickle
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.stored_models import SHAPES, VOCAB, hold, random_weights, store_run
from tests.tiny_models import LLAMA, SCALED, TINY
from torchtitan.__main__ import main
from torchtitan.models.decoder.model import Transformer
from torchtitan.models.layers import rope_table
from torchtitan.models.llama.args import LLAMA2_FLAVORS, LLAMA3_FLAVORS, LlamaArgs
from torchtitan.models.llama.meta import shape_of
from torchtitan.weights.hugging_face import copy_assets, save_hf
from torchtitan.weights.stored import open_model
from torchtitan.weights.tensors import Weights

ROOT = Path(__file__).parents[3]
HF = LLAMA.hugging_face()
TOKENIZER = ROOT / "tests/assets/tokenizer"


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def contents(weights: Weights) -> dict[str, Tensor]:
    return {name: weights.read(name) for name in weights.outline}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(a[n].dtype == b[n].dtype and torch.equal(a[n], b[n]) for n in a)


def convert(*words: Any) -> None:
    main(["convert", *map(str, words)])


@pytest.mark.parametrize("flavor", SHAPES)
def test_there_and_back_nothing_has_changed(flavor: str, tmp_path: Path) -> None:
    run = store_run(tmp_path / "run", flavor)
    convert(run, tmp_path / "hf", "--shard_gb", 0.0003)
    convert(tmp_path / "hf", tmp_path / "back")
    before, after = open_model(str(run)), open_model(str(tmp_path / "back"))
    assert same(contents(before.weights), contents(after.weights))
    assert before.blueprint.shape == after.blueprint.shape
    assert after.config is not None and after.config.model.name == "llama3"

    convert(tmp_path / "back", tmp_path / "again", "--shard_gb", 0.0003)
    files = sorted(path.name for path in (tmp_path / "hf").iterdir())
    assert files == sorted(path.name for path in (tmp_path / "again").iterdir())
    assert len([name for name in files if name.endswith(".safetensors")]) > 2
    for name in files:
        assert (tmp_path / "hf" / name).read_bytes() == (tmp_path / "again" / name).read_bytes(), name


@pytest.mark.parametrize("shard_gb", [5, 0.0003])
@pytest.mark.parametrize("flavor", SHAPES)
def test_transformers_loads_the_export_and_computes_the_same(flavor: str, shard_gb: float, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    run = store_run(tmp_path / "run", flavor)
    convert(run, tmp_path / "hf", "--shard_gb", shard_gb)
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    ours = Transformer(open_model(str(run)).blueprint.shape)
    ours.load_state_dict(contents(open_model(str(run)).weights), strict=flavor != "tiny-tied")
    tokens = torch.randint(VOCAB, (2, 64))
    with torch.no_grad():
        expected = theirs(tokens).logits
        assert (ours(tokens) - expected).abs().max() <= 1e-5 * expected.abs().max()
    read = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    text = "The module's functions:\n    return x"
    assert read.decode(read.encode(text, add_special_tokens=False)) == text
    assert theirs.generation_config.eos_token_id == 1


@pytest.mark.parametrize("flavor", ["tiny", "tiny-tied"])
def test_what_transformers_saves_is_read(flavor: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from transformers import AutoModelForCausalLM

    convert(store_run(tmp_path / "run", flavor), tmp_path / "hf")
    AutoModelForCausalLM.from_pretrained(tmp_path / "hf").save_pretrained(tmp_path / "saved", max_shard_size="300KB")
    shutil.copy(TOKENIZER / "tokenizer.json", tmp_path / "saved")
    assert len(list((tmp_path / "saved").glob("*.safetensors"))) > 1
    source = open_model(str(tmp_path / "saved"))
    assert source.blueprint.shape == open_model(str(tmp_path / "run")).blueprint.shape
    assert same(contents(source.weights), random_weights(SHAPES[flavor]))


def test_weights_change_their_type_where_that_is_asked_for(tmp_path: Path) -> None:
    run = store_run(tmp_path / "run")
    convert(run, tmp_path / "hf", "--dtype", "bfloat16")
    convert(tmp_path / "hf", tmp_path / "back", "--dtype", "float32")
    expected = {name: weight.bfloat16().float() for name, weight in random_weights(TINY).items()}
    assert same(contents(open_model(str(tmp_path / "back")).weights), expected)
    written = json.loads((tmp_path / "hf/config.json").read_text())
    assert written["torch_dtype"] == "bfloat16"
    assert {t.dtype for t in load_file(tmp_path / "hf/model.safetensors").values()} == {torch.bfloat16}


def meta_files(folder: Path, weights: dict[str, Tensor], args: LlamaArgs, count: int, by_vocabulary: bool) -> None:
    """As Meta's code has them: neighbours rotate, and `count` ranks hold a part each."""
    folder.mkdir()
    params = {"dim": args.dim, "n_layers": args.n_layers, "n_heads": args.n_heads, "n_kv_heads": args.n_kv_heads,
              "multiple_of": 32, "ffn_dim_multiplier": 0.9, "norm_eps": args.norm_eps, "rope_theta": args.rope_theta,
              "vocab_size": -1}  # fmt: skip
    (folder / "params.json").write_text(json.dumps(params))
    parts: list[dict[str, Tensor]] = [{"rope.freqs": torch.zeros(4)} for _ in range(count)]
    for name, weight in weights.items():
        kind = name.split(".")[-2]
        if kind in ("wq", "wk"):
            heads = args.n_heads if kind == "wq" else args.n_kv_heads
            weight = torch.stack(weight.unflatten(0, (heads, -1)).chunk(2, dim=1), dim=2).flatten(0, 2)
        dim = 1 if kind in ("wo", "w2") or (kind == "tok_embeddings" and not by_vocabulary) else 0
        for part, piece in zip(parts, [weight] * count if weight.ndim == 1 else weight.chunk(count, dim), strict=True):
            part[name] = piece.clone()
    for number, part in enumerate(parts):
        torch.save(part, folder / f"consolidated.{number:02d}.pth")
    shutil.copy(TOKENIZER / "tokenizer.json", folder)


@pytest.mark.parametrize(("count", "by_vocabulary"), [(1, True), (2, True), (2, False)])
def test_metas_files_are_read_whole_or_in_parts(count: int, by_vocabulary: bool, tmp_path: Path) -> None:
    weights = random_weights(TINY)
    meta_files(tmp_path / "meta", weights, TINY, count, by_vocabulary)
    convert(tmp_path / "meta", tmp_path / "ours")
    convert(tmp_path / "meta", tmp_path / "hf", "--to", "hf")
    assert same(contents(open_model(str(tmp_path / "ours")).weights), weights)
    assert same(contents(open_model(str(tmp_path / "hf")).weights), weights)


def test_metas_rotation_of_neighbours_becomes_ours_of_halves(tmp_path: Path) -> None:
    """Attention scores by Meta's formula, complex numbers of neighbours, from Meta's rows, and ours."""
    weights = random_weights(TINY)
    meta_files(tmp_path / "meta", weights, TINY, 1, True)
    stored = torch.load(tmp_path / "meta/consolidated.00.pth", weights_only=True)
    x, head_dim = torch.randn(16, TINY.dim), TINY.head_size

    frequency = TINY.rope_theta ** -(torch.arange(0, head_dim, 2).float() / head_dim)
    turn = torch.polar(torch.ones(16, head_dim // 2), torch.outer(torch.arange(16.0), frequency))[:, None]

    def rotated(name: str) -> Tensor:
        y = (x @ stored[f"layers.0.attention.{name}.weight"].T).unflatten(-1, (-1, head_dim))
        return torch.view_as_real(torch.view_as_complex(y.unflatten(-1, (-1, 2)).contiguous()) * turn).flatten(2)

    seen: list[Tensor] = []
    model = Transformer(replace(TINY, vocab_size=VOCAB))
    model.load_state_dict(contents(open_model(str(tmp_path / "meta")).weights))
    attention = model.layers["0"].attention
    attention.core.register_forward_pre_hook(lambda _, inputs: seen.extend(inputs[:2]))
    attention(x[None], *rope_table(torch.arange(16), TINY.head_size, TINY.rope_theta), None)
    ours = torch.einsum("shd,thd->hst", seen[0][0], seen[1][0].repeat_interleave(2, 1))
    theirs = torch.einsum("shd,thd->hst", rotated("wq"), rotated("wk").repeat_interleave(2, 1))
    assert torch.allclose(ours, theirs, atol=1e-3, rtol=1e-4)


def test_metas_params_of_31_and_32_become_their_flavors() -> None:
    common = {"norm_eps": 1e-5, "rope_theta": 500000.0, "use_scaled_rope": True, "n_kv_heads": 8}
    small = {"dim": 2048, "n_layers": 16, "n_heads": 32, "ffn_dim_multiplier": 1.5, "multiple_of": 256}
    large = {"dim": 4096, "n_layers": 32, "n_heads": 32, "ffn_dim_multiplier": 1.3, "multiple_of": 1024}
    assert shape_of(small | common, 128256) == LLAMA3_FLAVORS["1B"]
    assert shape_of(large | common, 128256) == LLAMA3_FLAVORS["8B"]
    older = {"dim": 4096, "n_layers": 32, "n_heads": 32, "multiple_of": 256, "norm_eps": 1e-5}
    assert shape_of(older, 32000) == LLAMA2_FLAVORS["7B"]
    unknown = shape_of(large | common, 1000)
    assert unknown == replace(LLAMA3_FLAVORS["8B"], vocab_size=1000)


@pytest.mark.parametrize("name", ["llama3 1B", "llama3 8B", "llama2 70B"])
def test_config_json_says_all_there_is_of_a_shape(name: str) -> None:
    args = {"llama3": LLAMA3_FLAVORS, "llama2": LLAMA2_FLAVORS}[name.split()[0]][name.split()[1]]
    assert HF.from_config(HF.to_config(args, "bfloat16", 1, 2)) == args


def test_config_json_of_transformers_5_is_read() -> None:
    config = HF.to_config(replace(LLAMA3_FLAVORS["8B"]), "bfloat16", 1, 2)
    scaling = config.pop("rope_scaling")
    config["rope_parameters"] = scaling | {"rope_theta": config.pop("rope_theta")}
    assert HF.from_config(config) == LLAMA3_FLAVORS["8B"]


def test_a_model_that_ours_cannot_be_is_refused_with_all_its_reasons() -> None:
    config = HF.to_config(replace(TINY, vocab_size=VOCAB), "float32", 0, 1)
    config |= {"hidden_act": "gelu", "attention_bias": True, "rope_scaling": {"type": "linear", "factor": 2.0}}
    with pytest.raises(ValueError, match="hidden_act = 'gelu', must be 'silu'.*attention_bias.*of the type 'linear'"):
        HF.from_config(config)
    scaling = HF.to_config(LLAMA3_FLAVORS["8B"], "bfloat16", 1, 2)["rope_scaling"] | {"factor": "8"}
    del scaling["original_max_position_embeddings"]
    with pytest.raises(ValueError, match="factor = '8' in its rotation 'llama3'.*embeddings = None .* whole number"):
        HF.from_config(config | {"rope_scaling": scaling})
    with pytest.raises(ValueError, match="model_type = 'qwen3', must be 'llama'.*sliding_window = 4096.*no vocab_size"):
        HF.from_config({k: v for k, v in config.items() if k != "vocab_size"} | {"model_type": "qwen3", "sliding_window": 4096})  # noqa: E501  # fmt: skip


def exported(folder: Path) -> Path:
    args = replace(TINY, vocab_size=VOCAB)
    config = HF.to_config(args, "float32", 0, 1)
    save_hf(hold(random_weights(TINY)), str(folder), HF.to_name, config, TOKENIZER, shard_bytes=300_000)
    return folder


def test_all_names_and_shapes_that_do_not_fit_are_listed(tmp_path: Path) -> None:
    folder = exported(tmp_path / "hf")
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        for name in list(tensors):
            if "layers.1.mlp" in name:
                tensors[name.replace("mlp", "experts")] = tensors.pop(name)
            elif "q_proj" in name:
                tensors[name] = tensors[name][:7].clone()
        save_file(tensors, path)
    with pytest.raises(ValueError) as caught:
        open_model(str(folder))
    lines = str(caught.value).splitlines()
    assert lines[0] == f"{folder} does not fit the model:" and len(lines) == 1 + 3 + 3 + 4
    for kind in ("gate", "up", "down"):
        assert f"  missing: model.layers.1.mlp.{kind}_proj.weight" in lines
        assert f"  unexpected: model.layers.1.experts.{kind}_proj.weight" in lines
    assert "  wrong shape: model.layers.3.self_attn.q_proj.weight is (7, 64), the model's is (64, 64)" in lines


def test_parameters_are_filled_in_their_own_type(tmp_path: Path) -> None:
    weights = open_model(str(exported(tmp_path / "hf"))).weights
    model = Transformer(replace(TINY, vocab_size=VOCAB)).bfloat16()
    parameters = dict(model.named_parameters())
    for name, parameter in parameters.items():
        weights.fill(name, parameter)
    assert same(parameters, {name: weight.bfloat16() for name, weight in random_weights(TINY).items()})


def renamed_in_index(folder: Path, name: Any) -> None:
    index = folder / "model.safetensors.index.json"
    named = json.loads(index.read_text())
    named["weight_map"]["model.norm.weight"] = name
    index.write_text(json.dumps(named))


def test_a_cache_of_the_hub_is_read_though_its_files_are_links(tmp_path: Path) -> None:
    blobs, folder = exported(tmp_path / "blobs"), tmp_path / "snapshots/1"
    folder.mkdir(parents=True)
    for file in blobs.iterdir():
        (folder / file.name).symlink_to(f"../../blobs/{file.name}")
    assert same(contents(open_model(str(folder)).weights), contents(open_model(str(blobs)).weights))


class Harmful:
    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("harm was done"),)


def saved(thing: Any) -> bytes:
    torch.save({"output.weight": thing}, file := io.BytesIO())
    return file.getvalue()


@pytest.mark.parametrize(
    ("held", "message"),
    [
        (saved(Harmful()), "and reading it could run any code; where it was made, save the weights alone"),
        (saved([1]), "cannot be read ("),
        (pickle.dumps(Harmful()), "cannot be read (RuntimeError: "),
        (b"", "cannot be read ("),
    ],
)
def test_a_pickle_is_refused_in_a_sentence_and_not_run(
    held: bytes, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "meta").mkdir()
    (tmp_path / "meta/params.json").write_text("{}")
    (tmp_path / "meta/consolidated.00.pth").write_bytes(held)
    assert message in refusal("convert", "meta", "hf")
    assert "is a file, which tells no shape of a model" in refusal("convert", "meta/consolidated.00.pth", "hf")
    torch.save({"output.weight": torch.zeros(2, 2)}, "meta/consolidated.00.pth")
    assert "cannot be read (KeyError: 'dim')" in refusal("convert", "meta", "hf")
    assert not Path("harm was done").exists()


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda f: next(f.glob("*-00002-of-*")).unlink(), "lacks model-00002-of-00005.safetensors; download all"),
        (lambda f: (f / "model-00002-of-00005.safetensors").write_bytes(b"\x08"), "00002.* is damaged"),
        (lambda f: (f / "model.safetensors.index.json").write_text('{"'), "index.json is not valid JSON"),
        (
            lambda f: renamed_in_index(f, "../x.safetensors"),
            "the file '../x.safetensors', which cannot lie",
        ),
        (lambda f: renamed_in_index(f, "/etc/hostname"), "names the file '/etc/hostname'"),
        (lambda f: renamed_in_index(f, ["x"]), "names the file"),
        (lambda f: (f / "model.safetensors.index.json").write_text("{}"), "has no weight_map"),
        (lambda f: (f / "config.json").write_text('{"'), "config.json is not valid JSON"),
        (lambda f: save_file({"a": torch.zeros(1, dtype=torch.int8)}, f / "model-00002-of-00005.safetensors"), "I8"),
    ],
)
def test_a_folder_that_is_not_whole_is_refused(harm: Callable[[Path], None], message: str, tmp_path: Path) -> None:
    folder = exported(tmp_path / "hf")
    harm(folder)
    with pytest.raises(ValueError, match=message):
        open_model(str(folder))


def test_a_tokenizers_file_comes_with_what_is_read_beside_it(tmp_path: Path) -> None:
    for name, copied in (("mine.json", "tokenizer.json"), ("tokenizer_config.json", "tokenizer_config.json")):
        (tmp_path / name).write_bytes((TOKENIZER / copied).read_bytes())
    copy_assets(tmp_path / "mine.json", tmp_path / "copy")
    assert sorted(path.name for path in (tmp_path / "copy").iterdir()) == ["tokenizer.json", "tokenizer_config.json"]
    (tmp_path / "pieces").write_bytes(b"aGVsbG8= 0\n")
    copy_assets(tmp_path / "pieces", tmp_path / "other")
    assert (tmp_path / "other/tokenizer.model").read_bytes() == b"aGVsbG8= 0\n"


def refusal(*words: Any) -> str:
    with pytest.raises(SystemExit) as caught:
        main([str(word) for word in words])
    return str(caught.value)


def test_nothing_is_written_over(tmp_path: Path) -> None:
    run = store_run(tmp_path / "run")
    before = sorted(tmp_path.rglob("*"))
    assert refusal("convert", run, run) == f"error: {run} is there already; remove it, or name another folder"
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf/note").touch()
    assert "is there already" in refusal("convert", run, tmp_path / "hf")
    assert "is there already" in refusal("convert", run, tmp_path / "hf", "--to", "torchtitan")
    assert sorted(tmp_path.rglob("*")) == sorted([*before, tmp_path / "hf", tmp_path / "hf/note"])


def test_what_holds_no_model_is_refused_with_what_was_looked_for(tmp_path: Path) -> None:
    assert "no checkpoint/step-N, config.json" in refusal("convert", tmp_path, tmp_path / "hf")
    run = store_run(tmp_path / "run")
    data = next((run / "checkpoint/step-0").glob("*.distcp"))
    whole = data.read_bytes()
    data.write_bytes(whole[:-20] + b"x" + whole[-19:])
    assert re.search("the checksum of .*distcp differs; convert another", refusal("convert", run, tmp_path / "hf"))
    data.write_bytes(whole[:-1])
    assert "step-0: " in refusal("convert", run, tmp_path / "hf")
    named = refusal("convert", run / "checkpoint/step-0", tmp_path / "hf")
    assert re.search("holds no model: step-0: .*bytes, the manifest says", named)
    (tmp_path / "meta").mkdir()
    (tmp_path / "meta/params.json").write_text("{}")
    assert "no consolidated.*.pth" in refusal("convert", tmp_path / "meta", tmp_path / "hf")


def test_a_run_its_checkpoints_and_a_step_lead_to_the_same_weights(tmp_path: Path) -> None:
    run = store_run(tmp_path / "run")
    (run / "checkpoint/step-9").mkdir()  # never finished
    places = [open_model(str(run / part)).weights.where for part in ("", "checkpoint", "checkpoint/step-0/")]
    assert places == [str(run / "checkpoint/step-0")] * 3


def test_a_shape_without_a_flavor_is_converted_evaluated_and_continued(tmp_path: Path) -> None:
    args = replace(TINY, vocab_size=VOCAB, norm_eps=1e-6, head_dim=16, rope_scaling=SCALED, max_seq_len=64)
    config = HF.to_config(args, "float32", 0, 1)
    save_hf(hold(random_weights(args)), str(tmp_path / "hf"), HF.to_name, config, TOKENIZER)
    convert(tmp_path / "hf", tmp_path / "ours")
    run = open_model(str(tmp_path / "ours"))
    assert run.blueprint.shape == args and same(contents(run.weights), random_weights(args))
    convert(tmp_path / "ours", tmp_path / "again")
    assert (tmp_path / "again/config.json").read_bytes() == (tmp_path / "hf/config.json").read_bytes()
    main(["generate", "--checkpoint", str(tmp_path / "hf"), "--prompt", "a", "--max_new_tokens", "2"])
    main(["eval", "--checkpoint", str(tmp_path / "hf"), "--", "--validation.steps", "1",  # as long as it can take
          "--validation.dataset_path", "tests/assets/pydocs/validation.jsonl"])  # fmt: skip


def test_a_checkpoint_of_a_flavor_that_is_gone_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = store_run(tmp_path / "run", "tiny-scaled")
    monkeypatch.delitem(LLAMA.flavors, "tiny-scaled")  # type: ignore[arg-type]
    message = refusal("convert", run, run / "hf")
    assert 'model.flavor = "tiny-scaled" is no flavor of tests.tiny_models:LLAMA; use one of tiny' in message


def test_a_tokenizer_with_more_ids_than_the_model_has_rows_is_refused(tmp_path: Path) -> None:
    weights = random_weights(TINY)
    for name in ("tok_embeddings.weight", "output.weight"):
        weights[name] = weights[name][:1000].clone()
    run = store_run(tmp_path / "run", weights=weights, model__vocab_size=2048)
    for verb in (["convert", run, tmp_path / "hf"], ["generate", "--checkpoint", run, "--prompt", "a"]):
        assert "the tokenizer has 2048 ids, but tests.tiny_models:LLAMA tiny has only 1000 rows" in refusal(*verb)
    assert not (tmp_path / "hf").exists()


MEMORY = """
import sys
from torchtitan.__main__ import main
main(sys.argv[1:])
print([line for line in open("/proc/self/status") if line.startswith("VmHWM")][0].split()[1])
"""


@pytest.mark.all
@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from Linux's /proc")
def test_a_conversion_holds_a_shard_and_not_the_model(tmp_path: Path) -> None:
    def peak_bytes(*words: Any) -> int:
        command = [sys.executable, "-c", MEMORY, "convert", *map(str, words), "--shard_gb", "0.04"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
        assert done.returncode == 0, done.stderr
        return int(done.stdout.split()[-1]) * 1024

    for flavor in ("narrow", "wide"):
        store_run(tmp_path / flavor, flavor)
    model_bytes = sum(weight.nbytes for weight in random_weights(LLAMA.flavors["wide"]).values())
    assert model_bytes > 5 * 40e6
    for way, forms in {"out": ("", "-hf"), "in": ("-hf", "-back")}.items():
        base, peak = (peak_bytes(tmp_path / f"{n}{forms[0]}", tmp_path / f"{n}{forms[1]}") for n in ("narrow", "wide"))
        assert peak - base < 60e6, (
            f"{way}: model {model_bytes / 1e6:.0f} MB, {(peak - base) / 1e6:.0f} MB over {base / 1e6:.0f} MB"
        )
