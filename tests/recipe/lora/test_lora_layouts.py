"""What is trained of a model is the same on any layout, also where it goes from layout to layout."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks import Ranks
from tests.recipe.distributed import cases
from tests.recipe.distributed.test_layouts import COMPILED, differences, layout, seldom
from tests.recipe.lora import own_module
from tests.stored_models import store_run
from tests.tiny_runs import read_records, tiny_config, train_here
from torchtitan.weights.stored import open_model

TP, PP = {"tp": 2}, {"pp": 2}
FULL = {"activation_checkpoint__mode": "full"}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "FSDP 2, recomputed": (2, layout(4) | FULL),
    "TP 2": (2, layout(**TP)),
    "TP 2, compiled": (2, layout(**TP) | COMPILED),
    "PP 2, compiled and recomputed": (2, layout(**PP) | COMPILED | FULL),
    "PP 2, ZBVZeroBubble": (2, layout(**PP, schedule="ZBVZeroBubble")),
    "CP 2": (2, layout(cp=2)),
    "FSDP 2 x TP 2": (4, layout(4, **TP)),
    "HSDP 2 x 2": (4, layout(2, replicate=2)),
    "PP 2 x TP 2, Interleaved1F1B": (4, layout(**PP, **TP, schedule="Interleaved1F1B")),
}
OFTEN = ("FSDP 2, recomputed", "PP 2, compiled and recomputed", "CP 2", "FSDP 2 x TP 2")
SAVING = {"checkpoint__enable": True, "lr_scheduler__total_steps": 6, "optimizer__lr": 3e-3}


def lora(base: Path, steps: int = 6, **keys: Any) -> dict[str, Any]:
    return SAVING | {"lora__rank": 3, "checkpoint__initial_load_path": str(base), "training__steps": steps} | keys


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return store_run(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def alone(base: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return train_here(tiny_config(tmp_path_factory.mktemp("alone"), **lora(base)))


def assert_same(ours: list[dict[str, Any]], reference: list[dict[str, Any]]) -> None:
    assert differences(ours, reference, "loss") <= 1e-5
    assert differences(ours, reference, "grad_norm") <= 1e-5


@pytest.mark.parametrize("name", seldom(LAYOUTS, OFTEN))
def test_every_layout_trains_the_adapter_of_one_process(
    ranks: Ranks, name: str, base: Path, alone: list[dict[str, Any]], tmp_path: Path
) -> None:
    """The rank of three divides by no number of ranks."""
    world_size, overrides = LAYOUTS[name]
    assert_same(ranks(cases.train, world_size, str(tmp_path), overrides | lora(base))[0], alone)
    adapter = open_model(str(tmp_path)).adapter
    assert adapter is not None and len(adapter.weights.outline) == 4 * 7 * 2
    adapter.check()  # all of each tensor that the ranks held is in the checkpoint


def test_ranks_of_tensor_parallelism_drop_what_one_process_drops(ranks: Ranks, base: Path, tmp_path: Path) -> None:
    keys = lora(base, 4, lora__dropout=0.4, optimizer__lr=3e-2)
    alone = train_here(tiny_config(tmp_path / "alone", **keys))
    assert_same(ranks(cases.train, 2, str(tmp_path / "run"), layout(**TP) | FULL | keys)[0], alone)
    plain = train_here(tiny_config(tmp_path / "plain", **keys | {"lora__dropout": 0.0}))
    assert differences(plain, alone, "loss") > 1e-3


def test_an_adapter_goes_from_layout_to_layout_as_if_nothing_had_happened(
    ranks: Ranks, base: Path, alone: list[dict[str, Any]], tmp_path: Path
) -> None:
    for steps, (world_size, overrides) in enumerate([(2, layout(4)), (4, layout(4, **TP)), (1, {}), (2, layout(**PP))]):
        ranks(cases.train, world_size, str(tmp_path), overrides | lora(base, steps + 3))
    assert_same(read_records(tmp_path), alone)


@pytest.mark.parametrize("schedule", seldom(["1F1B", "ZBVZeroBubble"], ["1F1B"]))
def test_a_stage_may_be_frozen_and_so_a_tied_weight(ranks: Ranks, schedule: str, tmp_path: Path) -> None:
    keys = lora(store_run(tmp_path / "base", "tiny-tied"), 3, model__flavor="tiny-tied", lora__targets=["layers.3"])
    alone = train_here(tiny_config(tmp_path / "alone", **keys))
    records = ranks(cases.train, 2, str(tmp_path / "run"), layout(**PP, schedule=schedule) | keys)[0]
    assert_same(records, alone)


@pytest.mark.parametrize("name", seldom(["FSDP 2", "TP 2", "PP 2"], ["PP 2"]))
def test_a_users_module_trains_its_adapter_on_any_layout(ranks: Ranks, name: str, tmp_path: Path) -> None:
    torch.manual_seed(3)
    torch.save(own_module.Model().state_dict(), tmp_path / "base.pt")
    keys = lora(tmp_path / "base.pt", 4, model__name=f"{own_module.__file__}:SPEC", training__local_batch_size=4)
    alone = train_here(tiny_config(tmp_path / "alone", **keys))
    degrees = {"TP 2": TP, "PP 2": PP}.get(name, {})
    records = ranks(cases.train, 2, str(tmp_path / "run"), keys | layout(4, **degrees))[0]
    assert_same(records, alone)


ONLY = {"training__train_only": ["layers.3.*", "layers.1.attention.w[qk]", "norm", "output"]}


@pytest.mark.parametrize("name", seldom(["FSDP 2", "TP 2", "PP 2"], ["PP 2"]))
def test_weights_that_are_not_named_stay_as_they_are(ranks: Ranks, name: str, tmp_path: Path) -> None:
    keys = SAVING | ONLY | {"training__steps": 4, "model__flavor": "tiny"}
    alone = train_here(tiny_config(tmp_path / "alone", **keys))
    degrees = {"FSDP 2": {"local_batch_size": 4}, "TP 2": TP, "PP 2": PP}[name]
    assert_same(ranks(cases.train, 2, str(tmp_path / "run"), keys | layout(**degrees))[0], alone)

    begun = tmp_path / "begun"
    train_here(tiny_config(begun, checkpoint__enable=True, checkpoint__create_seed_checkpoint=True))
    before, after = open_model(str(begun)).weights, open_model(str(tmp_path / "run")).weights
    changed = {name for name in before.outline if not torch.equal(before.read(name), after.read(name))}
    block = {name for name in before.outline if name.startswith("layers.3.")}
    more = {f"layers.1.attention.{each}.weight" for each in ("wq", "wk")} | {"norm.weight", "output.weight"}
    assert changed == block | more
    manifest = after.where + "/.metadata"
    assert b"optimizer.layers.3." in Path(manifest).read_bytes()
    assert b"optimizer.layers.2." not in Path(manifest).read_bytes()
