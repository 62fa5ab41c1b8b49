"""Qwen3 on any layout trains as on one process, and writes the same text; its head size is not dim / n_heads."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks import Ranks
from tests.recipe.distributed import cases
from tests.recipe.distributed.test_layouts import (
    COMPILED,
    differences,
    layout,
    of_one_process,
    parameter_difference,
    seldom,
)
from tests.recipe.models.test_qwen3_files import FAMILY, store_run
from tests.tiny_models import QWEN3
from torchtitan.__main__ import main
from torchtitan.hardware import Place
from torchtitan.tools.text.writer import Sampling, build_model, generate
from torchtitan.training.assemble import start_run
from torchtitan.weights.stored import open_model

PROMPTS = [[0, 5, 900, 31], [0, 77], [0, *range(100, 140)]]
TIED = {"model__flavor": "tiny-tied"}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "PP 2 x TP 2": (4, layout(tp=2, pp=2, microbatch_size=2)),
    "FSDP 2 x TP 2 x PP 2": (8, layout(4, tp=2, pp=2, microbatch_size=2)),
    "CP 2 x TP 2": (4, layout(cp=2, tp=2)),
    "PP 2, tied": (2, layout(pp=2) | TIED),
    "FSDP 2 x TP 2, tied, compiled, recompute": (
        4, layout(4, tp=2) | TIED | COMPILED | {"activation_checkpoint__mode": "selective",
                                                "activation_checkpoint__selective_ac_option": "op"}),
}  # fmt: skip
Trained = tuple[list[dict[str, Any]], dict[str, cases.Piece]]


@pytest.fixture(scope="module")
def alone() -> dict[str, Trained]:
    """One process's records and parameters of each flavor, filled as they are needed."""
    return {}


@pytest.mark.parametrize("name", seldom(LAYOUTS, ["PP 2 x TP 2", "CP 2 x TP 2"]))
def test_a_layout_trains_as_one_process_does(
    ranks: Ranks, alone: dict[str, Trained], tmp_path: Path, name: str
) -> None:
    world_size, overrides = LAYOUTS[name]
    # At 1e-2, the rate of the other tests, rounding puts parameters 4e-4 apart within 10 steps.
    overrides = overrides | {"model__name": FAMILY, "optimizer__lr": 3e-3, "training__steps": 5}
    answers = ranks(cases.train_and_keep, world_size, str(tmp_path / "ranks"), overrides)
    keys = of_one_process(overrides)
    if str(keys) not in alone:
        alone[str(keys)] = cases.train_and_keep(0, 1, str(tmp_path / "one"), keys)
    reference, parameters = alone[str(keys)]
    records = answers[0][0]
    found = [differences(records, reference, key) for key in ("loss", "grad_norm")]
    found.append(parameter_difference([pieces for _, pieces in answers], parameters))
    assert found[0] <= 1e-5 and found[1] <= 1e-4 and found[2] <= 1e-4, found
    assert records[-1]["loss"] < records[0]["loss"] - 0.1


def generated(rank: int, world_size: int, source: str) -> list[list[int | None]]:
    stored = open_model(source)
    run = start_run(
        stored.plain_config(source, stored.assets, world_size), stored.blueprint, Place(rank, rank, world_size)
    )
    axis = run.mesh.devices["tp"] if world_size > 1 else None
    model = build_model(stored, torch.float32, run.device, axis)
    return list(generate(model, stored.blueprint.shape.max_seq_len, PROMPTS, {1}, 12, Sampling()))


@pytest.mark.parametrize("flavor", seldom(QWEN3.flavors, ["tiny-tied"]))
def test_split_tensors_write_the_same_text(flavor: str, ranks: Ranks, tmp_path: Path) -> None:
    main(["convert", str(store_run(tmp_path / "run", flavor)), str(tmp_path / "hf")])
    (expected,) = ranks(generated, 1, str(tmp_path / "hf"))
    degree = 4 if flavor == "tiny" else 2
    assert ranks(generated, degree, str(tmp_path / "hf")) == [expected] * degree
