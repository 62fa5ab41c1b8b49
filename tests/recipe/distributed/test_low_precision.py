"""Float16; emulated float8, on several ranks and on one; asynchronous tensor parallelism; parameters on the host."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks import Ranks
from tests.recipe.distributed import cases
from tests.recipe.distributed.test_layouts import differences, seldom
from tests.tiny_runs import read_records, tiny_config, train_here
from torchtitan.checkpoint.storage import Storage
from torchtitan.parallel import loss_scale
from torchtitan.weights.checkpoint import open_checkpoint

Records = list[dict[str, Any]]
TWO: dict[str, Any] = {"training__local_batch_size": 4}
TENSOR_PARALLEL: dict[str, Any] = {"parallelism__tensor_parallel_degree": 2}
GATHERED = {"enable_fsdp_float8_all_gather": True}
PRECOMPUTED = GATHERED | {"precompute_float8_dynamic_scale_for_fsdp": True}


def float8(recipe: str = "tensorwise", **keys: Any) -> dict[str, Any]:
    keys |= {"emulate": True, "recipe_name": recipe}
    section = {f"quantize__linear__float8__{key}": value for key, value in keys.items()}
    return {"model__converters": ["quantize.linear.float8"], "training__steps": 5} | section


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Callable[[dict[str, Any]], Records]:
    seen: dict[str, Records] = {}

    def train_with(overrides: dict[str, Any]) -> Records:
        if str(overrides) not in seen:
            seen[str(overrides)] = train_here(tiny_config(tmp_path_factory.mktemp("one"), **overrides))
        return seen[str(overrides)]

    return train_with


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_float8_is_close_to_float32_but_not_the_same(one_process: Callable[..., Records], recipe: str) -> None:
    assert 1e-5 < differences(one_process(float8(recipe)), one_process({"training__steps": 5}), "loss") < 3e-3


LAYOUTS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "TP 2": (2, "tensorwise", TENSOR_PARALLEL),
    "CP 2": (2, "tensorwise", {"parallelism__context_parallel_degree": 2}),
    "FSDP on 2, by row": (2, "rowwise", TWO),
    "TP 2, by row": (2, "rowwise", TENSOR_PARALLEL),
    "HSDP 2 x 2, gathered in float8": (
        4, "tensorwise",
        float8(**GATHERED) | {"training__local_batch_size": 2, "parallelism__data_parallel_replicate_degree": 2}),
    # torchao's scales are then of a tensor-parallel rank's part of a weight, and precomputed ones of all of it.
    "FSDP 2 x TP 2, gathered in float8": (4, "tensorwise", float8(**GATHERED) | TWO | TENSOR_PARALLEL),
    "FSDP 2 x TP 2, precomputed": (4, "tensorwise", float8(**PRECOMPUTED) | TWO | TENSOR_PARALLEL),
}  # fmt: skip
OFTEN = "FSDP on 2, by row", "HSDP 2 x 2, gathered in float8", "FSDP 2 x TP 2, precomputed"


@pytest.mark.parametrize("layout", seldom(LAYOUTS, OFTEN))
def test_float8_on_a_layout_is_close_to_one_process(
    ranks: Ranks, one_process: Callable[..., Records], tmp_path: Path, layout: str
) -> None:
    """Not closer: a scale is taken over what a rank holds, and one rounding more moves all that follows."""
    world_size, recipe, overrides = LAYOUTS[layout]
    records = ranks(cases.train, world_size, str(tmp_path), float8(recipe) | overrides)[0]
    assert differences(records, one_process(float8(recipe)), "loss") <= 2e-3


def test_gathering_weights_in_float8_changes_no_number(ranks: Ranks, tmp_path: Path) -> None:
    """With moments in bfloat16, whose update is our own and writes into torchao's wrapped weights."""
    moments = {"optimizer__moments_dtype": "bfloat16"}
    plain, gathered, precomputed = (
        ranks(cases.train, 2, str(tmp_path / str(i)), float8(**keys) | TWO | moments | {"checkpoint__enable": True})[0]
        for i, keys in enumerate([{}, GATHERED, PRECOMPUTED])
    )
    saved = list((tmp_path / "1/checkpoint").glob("step-*/*.distcp"))
    assert saved and not any(b"torchao" in file.read_bytes() for file in saved)  # which reading would need
    stored = [open_checkpoint(Storage(str(tmp_path / f"{i}/checkpoint")), 5) for i in (0, 1)]
    for name in stored[0].outline:
        assert torch.allclose(stored[0].read(name), stored[1].read(name), atol=1e-5), name
    for other in (gathered, precomputed):
        assert differences(other, plain, "loss") <= 1e-6
        assert differences(other, plain, "grad_norm") <= 1e-5


def test_a_run_with_precomputed_scales_goes_on_to_the_bit(ranks: Ranks, tmp_path: Path) -> None:
    keys = float8(**PRECOMPUTED) | TWO | {"checkpoint__enable": True, "lr_scheduler__total_steps": 5}
    through = ranks(cases.train, 2, str(tmp_path / "through"), keys | {"training__steps": 3})[0]
    for steps in (2, 3):
        ranks(cases.train, 2, str(tmp_path / "in two"), keys | {"training__steps": steps})
    in_two = read_records(tmp_path / "in two")
    assert [record["loss"] for record in in_two] == [record["loss"] for record in through]


def test_precomputed_scales_are_those_of_the_whole_weights(ranks: Ranks, tmp_path: Path) -> None:
    for carried, expected in ranks(cases.precomputed_scales, 2, str(tmp_path), float8(**PRECOMPUTED) | TWO):
        assert len(carried) == 4 * 7 + 1
        assert carried == pytest.approx(expected, rel=1e-6)


def test_tensor_parallel_styles_communicate_in_float8_where_all_takers_of_an_input_can(ranks: Ranks) -> None:
    ((styles, shape, without),) = ranks(cases.float8_block, 1)
    assert styles == [
        *("PrepareFloat8ModuleInput", *["Float8ColwiseParallel"] * 3, "Float8RowwiseParallel"),
        *("PrepareModuleInput", "Float8ColwiseParallel", "ColwiseParallel", "Float8RowwiseParallel"),
    ]
    assert shape == (2, 8, 64) and without == []


def test_asynchronous_tensor_parallelism_prepares_what_the_compiler_looks_for(ranks: Ranks) -> None:
    assert ranks(cases.overlapped, 2) == [(True, True)] * 2


@pytest.mark.parametrize("layout", [
    pytest.param(TWO, id="FSDP 2"), pytest.param(TWO | TENSOR_PARALLEL, id="FSDP 2 x TP 2", marks=pytest.mark.all),
])  # fmt: skip
def test_parameters_kept_on_the_host_change_no_number(ranks: Ranks, tmp_path: Path, layout: dict[str, Any]) -> None:
    world_size = 2 * layout.get("parallelism__tensor_parallel_degree", 1)
    plain, offloaded = (
        ranks(cases.train, world_size, str(tmp_path / str(on)), {"training__enable_cpu_offload": on} | layout)[0]
        for on in (False, True)
    )
    assert differences(offloaded, plain, "loss") == differences(offloaded, plain, "grad_norm") == 0


FLOAT16 = {"training__mixed_precision_param": "float16", "training__dtype": "float32"}
SHORT = {"training__steps": 4, "training__seq_len": 16}  # a CPU is slow in float16


@pytest.mark.parametrize(
    ("num_ranks", "keys"),
    [
        (2, TWO),
        (2, TENSOR_PARALLEL),
        (2, {"parallelism__pipeline_parallel_degree": 2, "parallelism__pipeline_parallel_schedule": "1F1B"}),
    ],
)
def test_float16_is_close_to_float32_on_every_layout(
    ranks: Ranks, tmp_path: Path, one_process: Callable[..., Records], num_ranks: int, keys: dict[str, Any]
) -> None:
    short = FLOAT16 | SHORT
    exact, alone = one_process(SHORT), one_process(short)
    assert 1e-6 < differences(alone, exact, "loss") < 3e-3 and differences(alone, exact, "grad_norm") < 2e-2
    together = ranks(cases.train, num_ranks, str(tmp_path), short | keys)[0]
    assert differences(together, alone, "loss") < 3e-3 and differences(together, alone, "grad_norm") < 2e-2


def test_float16_leaves_out_updates_that_overflow_and_a_resumed_run_keeps_the_factor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(loss_scale, "FIRST_FACTOR", 2.0**26)
    monkeypatch.setattr(loss_scale, "STEPS_TO_DOUBLE", 3)
    keys = FLOAT16 | {"training__seq_len": 16, "checkpoint__enable": True, "lr_scheduler__total_steps": 12}
    whole = train_here(tiny_config(tmp_path / "whole", **keys | {"training__steps": 12}))
    left_out = [record["skipped_updates"] for record in whole]
    assert left_out[0] == 1 and whole[0]["grad_norm"] is None and 2 <= sum(left_out) <= 9
    trained = [record["loss"] for record in whole if record["loss"] is not None]
    assert trained[-1] < trained[0] and "gradient norm inf)" in caplog.text
    for steps in (5, 12):
        parted = train_here(tiny_config(tmp_path / "parted", **keys | {"training__steps": steps}))
    exact = [[(r["step"], r["loss"], r["grad_norm"]) for r in records] for records in (whole, parted)]
    assert exact[0] == exact[1]
