"""Decides where a run starts and what it takes from a checkpoint; `Checkpoints` carries the decision out.

The decision reads no file and no tensor. A start that would overwrite or mix up a run is refused.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torchtitan.checkpoint.storage import Manifest
from torchtitan.config.names import flat
from torchtitan.config.schema import Checkpoint
from torchtitan.refusal import Refusal


@dataclass(frozen=True)
class Start:
    """The step a run starts after, what it takes from the checkpoint, and the sentence that the log gives as reason."""

    step: int
    why: str
    weights: bool = False
    optimizer: bool = False
    data: bool = False
    train_state: bool = False  # step, token count and the number of skipped updates


def plan_start(
    section: Checkpoint,
    manifest: Manifest | None,
    url: str,
    *,
    holds_files: bool = False,
    resumes: bool,
    only_weights: bool,
    optimizer: str,
    last_step: int,
) -> Start:
    """Decide from the checkpoint that was found, if any: it lies at `url`.

    `resumes`: it is this run's own, not another run's. `holds_files`: the section names weights that another program
    saved.
    """
    if manifest is None:
        return _start_without_checkpoint(section, url, holds_files)
    if resumes:
        _check_own(section, manifest.step, url)
    saved = manifest.config["optimizer"]["name"]
    has_ended = resumes and manifest.step >= last_step
    excluded: set[str] = set(section.exclude_from_loading)
    if has_ended and only_weights:
        excluded = {"optimizer", "dataloader"}  # no step will need them: only `Saves.finish` is left to do
    elif resumes and section.initial_load_path is not None:
        # The user wrote the list for the checkpoint of `initial_load_path`. Here only a changed optimizer counts.
        excluded &= {"optimizer"} if saved != optimizer else set()
    elif not resumes and section.initial_load_model_only:
        excluded = {"optimizer", "dataloader", "train_state"}
    place = f"step {manifest.step} in {url}"
    if only_weights and not {"optimizer", "dataloader"} <= excluded:
        fix = f'start another run, in another job.dump_folder, with checkpoint.initial_load_path = "{url}"'
        raise Refusal(
            f"{place} holds only weights, and a run needs optimizer states and a place in the data to resume; "
            f"{fix if resumes else 'set checkpoint.initial_load_model_only = true'}"
        )
    if "optimizer" not in excluded and saved != optimizer:
        raise Refusal(
            f'optimizer.name = "{optimizer}", but {place} was saved with "{saved}", whose states are different; set it '
            f'to "{saved}", or start with new optimizer states: checkpoint.exclude_from_loading = ["optimizer"]'
        )
    step = 0 if "train_state" in excluded else manifest.step
    taken = [name for key, name in _PARTS.items() if key not in excluded]
    left = [name for key, name in _PARTS.items() if key in excluded]
    if has_ended:
        why = f"{place} is this run's last: nothing is left to train; for another run, set job.dump_folder"
        if manifest.step > last_step:
            why = f"{place} is beyond training.steps = {last_step}: nothing is left to train; for another run, set "
            why += "job.dump_folder"
    elif resumes:
        why = f"resuming from {place}" + (f", without its {_join(left)}" if left else "")
    else:
        why = f"starting at step {step} with the {_join(taken)} of {place}"
    return Start(
        step, why, True, "optimizer" not in excluded, "dataloader" not in excluded, "train_state" not in excluded
    )


_PARTS = {
    "weights": "weights",
    "optimizer": "optimizer states",
    "dataloader": "place in the data",
    "train_state": "step count",
}


def _start_without_checkpoint(section: Checkpoint, url: str, holds_files: bool) -> Start:
    if holds_files and not section.initial_load_model_only:
        raise Refusal(
            f"checkpoint.initial_load_model_only = false, but {section.initial_load_path} holds only weights; remove it"
        )
    if holds_files or section.initial_load_in_hf:
        path = section.initial_load_path or "model.hf_assets_path"
        said = " (checkpoint.initial_load_in_hf = true)" if section.initial_load_in_hf else ""
        return Start(0, f"starting at step 0 with the weights in {path}{said}", weights=True)
    if section.initial_load_path is not None:
        raise Refusal(
            f'checkpoint.initial_load_path = "{section.initial_load_path}" has no complete checkpoint; '
            "name a folder that has one, or files of weights, or remove the key to start with random weights"
        )
    return Start(0, f"starting at step 0: {url} has no complete checkpoint")


def _check_own(section: Checkpoint, step: int, url: str) -> None:
    """Refuse keys that would start a run again in the folder where it has saved."""
    keys = section.exclude_from_loading
    if "train_state" in keys and section.initial_load_path is None:
        raise Refusal(
            f"checkpoint.exclude_from_loading = {json.dumps(keys)} would start this run again at step 0 and "
            f'overwrite its records; remove "train_state" to resume from step {step}, or start another run, in another '
            f'job.dump_folder, with checkpoint.initial_load_path = "{url}"'
        )
    if step > 0 and section.create_seed_checkpoint:
        raise Refusal(
            f"checkpoint.create_seed_checkpoint = true saves the initial weights, but this run is already at step "
            f"{step} in {url}; choose another job.dump_folder, or remove the key to resume"
        )


def _join(names: Sequence[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


def describe_changes(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Each key that differs between two configurations, except the run's name, its folder and its seed."""
    old, new = flat(before), flat(now)
    names = [name for name in new if name.partition(".")[0] != "job" and name != "debug.seed"]
    return [f"{name} = {new[name]}, was {old.get(name, 'absent')}" for name in names if new[name] != old.get(name)]
