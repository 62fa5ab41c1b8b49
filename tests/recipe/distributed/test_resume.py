"""A run that resumes from a checkpoint, on the same layout or another, equals the uninterrupted run."""

from pathlib import Path
from typing import Any

import pytest

from tests.ranks import Ranks
from tests.recipe.distributed import cases
from tests.recipe.distributed.test_layouts import LAYOUTS, OPTIMIZERS, differences, layout, of_one_process
from tests.tiny_runs import read_records
from torchtitan.checkpoint.storage import Storage

SAVING = {"checkpoint__enable": True, "lr_scheduler__total_steps": 10}
VALIDATING = {
    "validation__enable": True,
    "validation__dataset": "pydocs_validation",
    "validation__seq_len": 64,
    "validation__freq": 2,
    "validation__steps": 1,
}


def saving(overrides: dict[str, Any], steps: int, **more: Any) -> dict[str, Any]:
    return overrides | SAVING | {"training__steps": steps} | more


def test_a_run_goes_from_layout_to_layout_as_if_nothing_had_happened(ranks: Ranks, tmp_path: Path) -> None:
    """Optimizer and data move too; a tied weight is stored once, and a pipeline holds it twice."""
    tied = {"model__flavor": "tiny-tied"}
    alone = saving(of_one_process(layout()) | tied, 8) | {"checkpoint__enable": False}
    reference = ranks(cases.train, 1, str(tmp_path / "alone"), alone)[0]
    layouts = LAYOUTS | {"one process": (1, layout())}
    names = ["FSDP 4", "FSDP 2 x TP 2", "one process", "PP 2 x FSDP 2 x TP 2, ZBVZeroBubble"]
    for number, name in enumerate(names):
        world_size, overrides = layouts[name]
        ranks(cases.train, world_size, str(tmp_path / "moved"), saving(overrides | tied, 2 * number + 2))
    records = read_records(tmp_path / "moved")
    assert differences(records, reference, "loss") <= 1e-5
    assert differences(records, reference, "grad_norm") <= 1e-4


@pytest.mark.parametrize(
    ("name", "mode", "optimizer"),
    [
        ("HSDP 2 x 2", "disabled", "AdamW"),
        ("PP 2, 1F1B", "async", "AdamW"),
        ("FSDP 2", "async_with_pinned_mem", "Muon, moments in bfloat16"),
    ],
)
def test_on_the_same_layout_it_is_the_same_to_the_bit(
    ranks: Ranks, tmp_path: Path, name: str, mode: str, optimizer: str
) -> None:
    world_size, overrides = LAYOUTS[name]
    overrides = overrides | OPTIMIZERS.get(optimizer, {})
    keys = {"checkpoint__async_mode": mode}
    overrides = overrides | VALIDATING  # also after the last step, before its checkpoint is written
    through = ranks(cases.train_and_keep, world_size, str(tmp_path / "through"), saving(overrides, 4))
    ranks(cases.train, world_size, str(tmp_path / "in two"), saving(overrides, 2, **keys))
    in_two = ranks(cases.train_and_keep, world_size, str(tmp_path / "in two"), saving(overrides, 4, **keys))
    for (_, ours), (_, theirs) in zip(in_two, through, strict=True):
        assert all(ours[name].value.equal(piece.value) for name, piece in theirs.items())
    exact = [
        [[record[key] for key in ("step", "loss", "grad_norm", "tokens_seen")] for record in read_records(folder)]
        for folder in (tmp_path / "through", tmp_path / "in two")
    ]
    assert exact[0] == exact[1] and len(exact[0]) == 4


def test_a_fault_of_one_ranks_disk_is_raised_on_all_ranks(ranks: Ranks, tmp_path: Path) -> None:
    def run(fault: str, steps: int) -> list[str]:
        overrides = saving(layout(4), steps, checkpoint__interval=2, checkpoint__keep_latest_k=1)
        overrides["comm__train_timeout_seconds"] = 2
        return ranks(cases.train_beside_a_disk, 2, str(tmp_path), overrides, fault)

    checkpoints = Storage(str(tmp_path / "checkpoint"))
    assert run("stale", 3) == ["", ""] and checkpoints.steps() == [3]  # the save of step 2 failed
    assert run("slow", 4) == ["", ""] and checkpoints.steps() == [4]  # the save takes longer than a collective may
    first, second = run("away", 6)
    assert first == second and first.startswith(f"step 4 in {tmp_path}/checkpoint is complete where rank 0 runs, but ")
    assert "not where rank 1 does: " in first
    assert first.endswith(" is missing; put checkpoint.folder where all nodes share it")
