"""Where a run starts and what it takes from a checkpoint: a table of cases, without a file or a tensor."""

from typing import Any

import pytest

from torchtitan.checkpoint.storage import Manifest
from torchtitan.config.schema import Checkpoint
from torchtitan.refusal import Refusal
from torchtitan.training.checkpoints.resume import Start, describe_changes, plan_start

EVERYTHING = ("weights", "optimizer", "data", "train_state")
ELSEWHERE = {"initial_load_path": "elsewhere"}
ALL_OF_ELSEWHERE = ELSEWHERE | {"initial_load_model_only": False}


def plan(keys: dict[str, Any], step: int | None, optimizer: str = "AdamW", **found: bool) -> Start:
    """Decide for a run of 10 steps that found a checkpoint of this step, saved with AdamW."""
    config = {"optimizer": {"name": "AdamW"}}
    manifest = None if step is None else Manifest(step, {}, config, "1 rank", {}, {})
    found = {"resumes": step is not None, "only_weights": False} | found
    return plan_start(Checkpoint(enable=True, **keys), manifest, "runs/a", optimizer=optimizer, last_step=10, **found)


@pytest.mark.parametrize(
    ("keys", "step", "found", "starts_at", "takes", "why"),
    [
        ({}, None, {}, 0, (), "starting at step 0: runs/a has no complete checkpoint"),
        ({"create_seed_checkpoint": True}, None, {}, 0, (), "starting at step 0: runs/a has no complete checkpoint"),
        ({}, 4, {}, 4, EVERYTHING, "resuming from step 4 in runs/a"),
        ({"load_step": 4}, 4, {}, 4, EVERYTHING, "resuming from step 4 in runs/a"),
        ({"load_only": True}, 4, {}, 4, EVERYTHING, "resuming from step 4 in runs/a"),
        ({}, 0, {}, 0, EVERYTHING, "resuming from step 0 in runs/a"),  # a seed checkpoint
        ({"create_seed_checkpoint": True}, 0, {}, 0, EVERYTHING, "resuming from step 0 in runs/a"),
        (
            {"exclude_from_loading": ["optimizer"]}, 4, {}, 4, ("weights", "data", "train_state"),
            "resuming from step 4 in runs/a, without its optimizer states",
        ),
        (
            {"exclude_from_loading": ["optimizer"]}, 4, {"optimizer": "Muon"}, 4, ("weights", "data", "train_state"),
            "resuming from step 4 in runs/a, without its optimizer states",
        ),
        (
            {"exclude_from_loading": ["dataloader", "optimizer"]}, 4, {"only_weights": True}, 4,
            ("weights", "train_state"),
            "resuming from step 4 in runs/a, without its optimizer states and place in the data",
        ),
        (
            {}, 10, {}, 10, EVERYTHING,
            "step 10 in runs/a is this run's last: nothing is left to train; for another run, set job.dump_folder",
        ),
        (
            {}, 12, {}, 12, EVERYTHING,
            "step 12 in runs/a is beyond training.steps = 10: nothing is left to train; for another run, set "
            "job.dump_folder",
        ),
        (
            {}, 10, {"only_weights": True, "optimizer": "Muon"}, 10, ("weights", "train_state"),
            "step 10 in runs/a is this run's last: nothing is left to train; for another run, set job.dump_folder",
        ),
        (ELSEWHERE, 4, {"resumes": False}, 0, ("weights",), "starting at step 0 with the weights of step 4 in runs/a"),
        (
            ELSEWHERE, 10, {"resumes": False, "only_weights": True, "optimizer": "Muon"}, 0, ("weights",),
            "starting at step 0 with the weights of step 10 in runs/a",
        ),
        (
            ALL_OF_ELSEWHERE, 4, {"resumes": False}, 4, EVERYTHING,
            "starting at step 4 with the weights, optimizer states, place in the data and step count of step 4 "
            "in runs/a",
        ),
        (
            ALL_OF_ELSEWHERE | {"exclude_from_loading": ["train_state", "dataloader"]}, 4, {"resumes": False}, 0,
            ("weights", "optimizer"),
            "starting at step 0 with the weights and optimizer states of step 4 in runs/a",
        ),
        # The list was for the checkpoint elsewhere: this run has saved since.
        (
            ALL_OF_ELSEWHERE | {"exclude_from_loading": ["train_state", "dataloader", "optimizer"]}, 4, {}, 4,
            EVERYTHING, "resuming from step 4 in runs/a",
        ),
        (
            ELSEWHERE | {"exclude_from_loading": ["optimizer", "dataloader"]}, 4, {"optimizer": "Muon"}, 4,
            ("weights", "data", "train_state"), "resuming from step 4 in runs/a, without its optimizer states",
        ),
        (
            ELSEWHERE | {"initial_load_in_hf": True}, None, {}, 0, ("weights",),
            "starting at step 0 with the weights in elsewhere (checkpoint.initial_load_in_hf = true)",
        ),
        (
            {"initial_load_in_hf": True}, None, {}, 0, ("weights",),
            "starting at step 0 with the weights in model.hf_assets_path (checkpoint.initial_load_in_hf = true)",
        ),
        (ELSEWHERE | {"initial_load_in_hf": True}, 4, {}, 4, EVERYTHING, "resuming from step 4 in runs/a"),
    ],
)  # fmt: skip
def test_a_run_starts_where_its_checkpoints_say(
    keys: dict[str, Any], step: int | None, found: dict[str, Any], starts_at: int, takes: tuple[str, ...], why: str
) -> None:
    assert plan(keys, step, **found) == Start(starts_at, why, **dict.fromkeys(takes, True))


@pytest.mark.parametrize(
    ("keys", "step", "found", "message"),
    [
        (
            ELSEWHERE | {"initial_load_model_only": False}, None, {"holds_files": True},
            "checkpoint.initial_load_model_only = false, but elsewhere holds only weights; remove it",
        ),
        (
            ELSEWHERE, None, {},
            'checkpoint.initial_load_path = "elsewhere" has no complete checkpoint; name a folder that has one, or '
            "files of weights, or remove the key to start with random weights",
        ),
        (
            {"exclude_from_loading": ["train_state"]}, 4, {},
            'checkpoint.exclude_from_loading = ["train_state"] would start this run again at step 0 and overwrite its '
            'records; remove "train_state" to resume from step 4, or start another run, in another job.dump_folder, '
            'with checkpoint.initial_load_path = "runs/a"',
        ),
        (
            {"create_seed_checkpoint": True}, 4, {},
            "checkpoint.create_seed_checkpoint = true saves the initial weights, but this run is already at step 4 in "
            "runs/a; choose another job.dump_folder, or remove the key to resume",
        ),
        (
            {}, 4, {"only_weights": True},
            "step 4 in runs/a holds only weights, and a run needs optimizer states and a place in the data to resume; "
            'start another run, in another job.dump_folder, with checkpoint.initial_load_path = "runs/a"',
        ),
        (
            {"exclude_from_loading": ["optimizer"]}, 4, {"only_weights": True},
            "step 4 in runs/a holds only weights, and a run needs optimizer states and a place in the data to resume; "
            'start another run, in another job.dump_folder, with checkpoint.initial_load_path = "runs/a"',
        ),
        (
            ALL_OF_ELSEWHERE, 10, {"only_weights": True, "resumes": False},
            "step 10 in runs/a holds only weights, and a run needs optimizer states and a place in the data to resume; "
            "set checkpoint.initial_load_model_only = true",
        ),
        (
            {}, 4, {"optimizer": "Muon"},
            'optimizer.name = "Muon", but step 4 in runs/a was saved with "AdamW", whose states are different; set it '
            'to "AdamW", or start with new optimizer states: checkpoint.exclude_from_loading = ["optimizer"]',
        ),
        (
            ALL_OF_ELSEWHERE, 4, {"optimizer": "Muon", "resumes": False},
            'optimizer.name = "Muon", but step 4 in runs/a was saved with "AdamW", whose states are different; set it '
            'to "AdamW", or start with new optimizer states: checkpoint.exclude_from_loading = ["optimizer"]',
        ),
    ],
)  # fmt: skip
def test_a_start_that_would_lose_or_mix_up_a_run_is_refused(
    keys: dict[str, Any], step: int | None, found: dict[str, Any], message: str
) -> None:
    with pytest.raises(Refusal) as refused:
        plan(keys, step, **found)
    assert str(refused.value) == message


def test_changes_of_a_configuration_are_listed_without_name_folder_and_seed() -> None:
    before = {"job": {"dump_folder": "a"}, "debug": {"seed": 1}, "optimizer": {"lr": 0.1, "name": "AdamW"}}
    now = {"job": {"dump_folder": "b"}, "debug": {"seed": None}, "optimizer": {"lr": 0.2, "name": "AdamW", "new": 3}}
    assert describe_changes(before, now) == ["optimizer.lr = 0.2, was 0.1", "optimizer.new = 3, was absent"]
