"""What an adapter is saved with, what it is read with, and what is refused."""

import json
import math
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.stored_models import random_weights, store_run
from tests.tiny_models import TINY
from tests.tiny_runs import keys_read, read_records, tiny_config, train_here
from torchtitan.__main__ import main
from torchtitan.config.load import ConfigError
from torchtitan.config.names import key_names
from torchtitan.models.families import load_run, plan_model
from torchtitan.parallel.collectives import stop_process_group
from torchtitan.refusal import Refusal
from torchtitan.tools.dry_run.estimate import estimate
from torchtitan.weights.adapted import StoredAdapter
from torchtitan.weights.stored import open_model
from torchtitan.weights.tensors import Weights


def lora(base: Path, steps: int = 2, **keys: Any) -> dict[str, Any]:
    keys = {"lora__rank": 4, "checkpoint__initial_load_path": str(base), "training__steps": steps} | keys
    return {"checkpoint__enable": True, "lr_scheduler__total_steps": 4, "optimizer__lr": 3e-3} | keys


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return store_run(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def trained(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    keys = {"optimizer__average_decay": 0.5, "lora__dropout": 0.25, "activation_checkpoint__mode": "full"}
    with keys_read() as read:
        train_here(tiny_config(folder, **lora(base, **keys)))
    assert {key for key in key_names() if key.startswith("lora.")} <= read
    return folder


@contextmanager
def refused(message: str) -> Iterator[None]:
    try:
        with pytest.raises((Refusal, SystemExit), match=message):
            yield
    finally:
        stop_process_group()


def adapter_of(run: Path) -> StoredAdapter:
    found = open_model(str(run)).adapter
    assert found is not None
    return found


def test_a_checkpoint_holds_the_adapter_and_where_its_base_is(base: Path, trained: Path) -> None:
    step = trained / "checkpoint/step-2"
    names = re.findall(r"[\w.]*\.weight", (step / ".metadata").read_text(errors="ignore"))
    assert not names and len(adapter_of(trained).weights.outline) == 4 * 7 * 2
    said = json.loads((step / "manifest.json").read_text())["run"]["lora"]
    assert said["base"] == str(base / "checkpoint/step-0") and len(said["hash"]) == 64 and len(said["norms"]) == 56


def test_a_run_goes_on_and_draws_the_same_zeros(base: Path, tmp_path: Path) -> None:
    keys = {"lora__dropout": 0.25}
    through = train_here(tiny_config(tmp_path / "through", **lora(base, 4, **keys)))
    train_here(tiny_config(tmp_path / "in two", **lora(base, 2, **keys)))
    in_two = train_here(tiny_config(tmp_path / "in two", **lora(base, 4, **keys)))
    exact = [[(r["step"], r["loss"], r["grad_norm"]) for r in records] for records in (through, in_two)]
    assert exact[0] == exact[1] and len(exact[0]) == 4
    without = train_here(tiny_config(tmp_path / "without", **lora(base, 4)))
    assert through[0]["loss"] == without[0]["loss"] and through[3]["loss"] != without[3]["loss"]


def test_an_export_takes_the_average_and_eval_and_generate_the_merged_model(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["convert", str(trained), str(tmp_path / "adapter"), "--dtype", "bfloat16"])
    assert "read back: all 56 tensors are the checkpoint's; of 4 prompts, merged and" in capsys.readouterr().out
    held, written = adapter_of(trained).weights, load_file(tmp_path / "adapter/adapter_model.safetensors")
    assert len(written) == 56
    name = "layers.1.feed_forward.w2.lora_B"
    found = written["base_model.model.model.layers.1.mlp.down_proj.lora_B.weight"]
    assert found.equal(held.read(name).bfloat16()) and found.any(1).all()
    main(["convert", str(trained), str(tmp_path / "merged"), "--merge"])
    said = []
    for place in (trained, tmp_path / "merged"):
        capsys.readouterr()
        main(["eval", "--checkpoint", str(place), "--", "--validation.steps", "1", "--validation.seq_len", "64",
              "--validation.dataset_path", "tests/assets/pydocs/validation.jsonl", "--training.global_batch_size", "8",
              "--training.mixed_precision_param", "float32"])  # fmt: skip
        main(["generate", "--checkpoint", str(place), "--prompt", "a", "--max_new_tokens", "4", "--temperature", "0"])
        out = capsys.readouterr().out
        said.append((re.findall(r"loss [\d.]+", out), out.splitlines()[-1]))
    assert said[0] == said[1] and said[0][0]


def test_a_run_begins_with_the_merged_model_of_another(trained: Path, tmp_path: Path) -> None:
    main(["convert", str(trained), str(tmp_path / "merged"), "--to", "torchtitan"])
    losses = []
    for name, keys in (("adapter", {}), ("whole", {"lora__rank": None}), ("plain", {"lora__rank": None})):
        base = tmp_path / "merged" if name == "plain" else trained
        losses.append(train_here(tiny_config(tmp_path / name, **lora(base, 1, **keys)))[0]["loss"])
    assert losses[0] == losses[1] == losses[2]


def test_a_last_save_of_weights_alone_is_an_adapter_and_a_merged_folder(base: Path, tmp_path: Path) -> None:
    end = {"checkpoint__last_save_model_only": True, "checkpoint__last_save_in_hf": True}
    end |= {"checkpoint__export_dtype": "bfloat16", "optimizer__name": "Muon", "training__enable_cpu_offload": True}
    train_here(tiny_config(tmp_path, **lora(base, 2, **end)))
    found, merged = open_model(str(tmp_path)), open_model(str(tmp_path / "hf"))
    adapter_of(tmp_path).check()
    assert found.adapter is not None and {t.dtype for t in found.adapter.weights.outline.values()} == {torch.bfloat16}
    name = "layers.0.attention.wq.weight"
    assert merged.weights.read(name).equal(found.weights.read(name, torch.bfloat16))


def test_a_changed_base_is_refused(trained: Path, base: Path, tmp_path: Path) -> None:
    weights = random_weights(TINY)
    weights["layers.2.attention.wv.weight"][3, 5] += 1e-3
    other = store_run(tmp_path / "other", weights=weights)
    run = shutil.copytree(trained, tmp_path / "run")
    with refused(f"trained on {base}/checkpoint/step-0 .*, and {other}/checkpoint/step-0 holds other weights"):
        train_here(tiny_config(run, **lora(other, 4, optimizer__average_decay=0.5)))
    manifest = json.loads((run / "checkpoint/step-2/manifest.json").read_text())
    assert manifest["run"]["lora"]["base"] != str(other)
    adapter = adapter_of(run)
    moved = shutil.move(base, tmp_path / "moved")
    try:
        with refused(f"the base of this adapter is missing: {adapter.where} is not there"):
            main(["convert", str(run), str(tmp_path / "adapter")])
    finally:
        shutil.move(moved, base)


def test_an_adapter_of_which_a_half_is_zeros_is_no_export(trained: Path) -> None:
    adapter = adapter_of(trained)

    def fill(name: str, tensor: torch.Tensor) -> None:
        adapter.saved.fill(name, tensor)
        if name.endswith("layers.0.attention.wo.lora_B"):
            tensor[32:] = 0.0

    adapter.check()
    with refused("is not whole: layers.0.attention.wo.lora_B has the norm"):
        replace(adapter, saved=Weights("there", adapter.saved.outline, fill)).check()


def test_adapters_that_do_not_fit_are_refused(trained: Path, base: Path, tmp_path: Path) -> None:
    main(["convert", str(trained), str(tmp_path / "adapter")])
    begins = {"lora__initial_load_path": str(tmp_path / "adapter")}
    with refused("was trained with other keys; set lora.rank = 4, lora.alpha = 16"):
        train_here(tiny_config(tmp_path / "1", **lora(base, **begins, lora__rank=8, lora__alpha=2.0)))
    with refused("does not fit this run's lora.targets:\n.*of no target: base_model.model.model.layers.0.mlp"):
        train_here(tiny_config(tmp_path / "2", **lora(base, **begins, lora__targets=["wq"])))
    config = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    (tmp_path / "adapter/adapter_config.json").write_text(json.dumps(config | {"use_dora": True}))
    with refused("is an adapter that this recipe cannot train: use_dora = True"):
        train_here(tiny_config(tmp_path / "3", **lora(base, **begins)))
    with refused("has no adapter_config.json; name the folder of an adapter"):
        train_here(tiny_config(tmp_path / "4", **lora(base, lora__initial_load_path=str(tmp_path))))
    file = tmp_path / "adapter/adapter_model.safetensors"
    save_file({name: tensor[:, :1].clone() for name, tensor in load_file(file).items()}, file)
    (tmp_path / "adapter/adapter_config.json").write_text(json.dumps(config))
    with refused("wrong shape: base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight is"):
        train_here(tiny_config(tmp_path / "5", **lora(base, **begins)))
    with refused("--merge: .* has no adapter"):
        main(["convert", str(base), str(tmp_path / "hf"), "--merge"])


NAMES = "layers.*.attention.wk, layers.*.attention.wo, layers.*.attention.wq, .*, output"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"lora__targets": ["wz"]}, rf'lora.targets has "wz", which matches nothing; the linear layers are {NAMES}'),
        ({"lora__targets": ["norm"]}, 'lora.targets has "norm", which is no linear layer .*: norm; the linear'),
        ({"lora__targets": ["output"], "model__flavor": "tiny-tied"}, "names output, whose weight another module has"),
        ({"lora__rank": None, "training__train_only": ["layers.9.*"]}, 'train_only has "layers.9.*", which matches no'),
    ],
)
def test_a_name_that_the_model_has_not_is_refused_with_those_that_it_has(
    keys: dict[str, Any], message: str, base: Path, tmp_path: Path
) -> None:
    with refused(message):
        train_here(tiny_config(tmp_path, **lora(base, **keys)))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"checkpoint__initial_load_path": None}, "lora.rank = 4 trains adapters of a model that is there"),
        ({"checkpoint__initial_load_model_only": False}, "takes only the weights of checkpoint.initial_load_path"),
        ({"checkpoint__initial_load_missing": ["a"]}, "what is missing would be frozen as it was drawn"),
        ({"lora__rank": None, "lora__alpha": 2.0}, "lora.alpha = 2.0 without lora.rank"),
        ({"training__train_only": ["norm"]}, "the adapters are what is trained; remove one of them"),
        ({"model__converters": ["quantize.linear.float8"]}, "lora.rank = 4 with quantize.linear.float8"),
        (
            {"lora__rank": None, "training__train_only": ["norm"], "model__converters": ["quantize.linear.float8"]},
            r'training.train_only = \["norm"\] with quantize.linear.float8',
        ),
    ],
)
def test_values_that_do_not_go_together_are_refused(keys: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        tiny_config(tmp_path, **lora(tmp_path) | keys)


def test_an_8b_model_with_an_adapter_fits_beside_its_weights_in_bfloat16() -> None:
    """At a batch of one sequence of 2,048 tokens, recomputed."""
    file = "train_configs/llama3_8b_lora.toml"
    config, blueprint = load_run(["--job.config_file", file, "--training.global_batch_size", "1"], 1)
    peak = estimate(config, blueprint, 0, 1).peak_bytes
    assert peak <= 1.15 * 2 * blueprint.num_parameters


def test_mfu_counts_what_a_frozen_weight_takes(base: Path, trained: Path, tmp_path: Path) -> None:
    """A frozen weight takes 4 FLOPs a token, 2 before the first that is trained, and a trained one 6."""
    from torchtitan.hardware import Place
    from torchtitan.training.assemble import start_run

    block = 64 * (64 + 32 + 32 + 64) + 3 * 64 * 160
    attention, norms, ends = 4 * 64 * 64, 2 * 64, 2048 * 64
    adapter = 4 * (2 * (64 + 64) + 2 * (64 + 32) + 3 * (64 + 160))
    counts = []
    for keys in (lora(base), {"training__train_only": ["layers.3", "output"]}):
        config = tiny_config(tmp_path, **keys)
        with start_run(config, plan_model(config), Place(0, 0, 1)) as run:
            counts.append(run.flops_per_token)
    each = 4 * (block + norms) + 3 * attention
    assert counts[0] == 4 * (each + 6 * adapter) + 4 * (64 + ends)
    first = 3 * (2 * (block + norms) + attention)
    assert counts[1] == first + 6 * (block + norms) + 3 * attention + 4 * 64 + 6 * ends
    record = read_records(trained)[-1]
    assert math.isfinite(record["loss"])
