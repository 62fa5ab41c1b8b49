"""Experts on any layout train as on one process, whoever has them and however the tokens choose."""

from pathlib import Path
from typing import Any

import pytest

from tests.ranks import Ranks
from tests.recipe.distributed import cases
from tests.recipe.distributed.test_layouts import differences, layout, of_one_process

FAMILY = {"model__name": "tests.tiny_models:EXPERTS", "optimizer__lr": 3e-3}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "FSDP 2": (2, layout(4)),
    "EP 2": (2, layout(4, expert_parallel_degree=2)),
    "TP 2": (2, layout(tp=2)),
    "EP 2 x FSDP 2": (4, layout(2, expert_parallel_degree=2)),
    "EP 4": (4, layout(2, expert_parallel_degree=4)),
    "EP 2 x TP 2": (4, layout(4, tp=2, expert_parallel_degree=2)),
    "CP 2 x EP 2": (4, layout(4, cp=2, expert_parallel_degree=2)),
    "HSDP 2 x EP 2": (4, layout(2, replicate=2, expert_parallel_degree=2)),
    "PP 2 x TP 2": (4, layout(pp=2, tp=2, expert_parallel_degree=2, microbatch_size=2)),
    "EP 2 x PP 2 x FSDP 2": (8, layout(2, pp=2, expert_parallel_degree=2)),
}


@pytest.mark.parametrize("balance", ["loss", "bias"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_trains_as_one_process_does(ranks: Ranks, tmp_path: Path, name: str, balance: str) -> None:
    world_size, overrides = LAYOUTS[name]
    overrides = overrides | FAMILY | {"model__balance": balance, "training__global_batch_size": 16}
    records = ranks(cases.train, world_size, str(tmp_path / "ranks"), overrides)[0]
    reference = cases.train(0, 1, str(tmp_path / "one"), of_one_process(overrides))
    assert differences(records, reference, "loss") <= 1e-5
    assert differences(records, reference, "grad_norm") <= 1e-4
    assert [r["expert_load_by_layer"] for r in records] == [r["expert_load_by_layer"] for r in reference]
