"""Refuses a saved place in the data that belongs to other data than this run reads."""

from collections.abc import Sequence
from typing import Any

from torchtitan.refusal import Refusal


def check_state(state: dict[str, Any], own: dict[str, Any], names: Sequence[str]) -> None:
    """`own` is this rank's state at any place in the data."""
    if state["num_streams"] != own["num_streams"]:
        raise Refusal(
            f"the saved data state has {state['num_streams']} streams, this run has {own['num_streams']}; "
            f"set training.num_streams = {state['num_streams']}"
        )
    if state["shuffle"] != own["shuffle"]:
        raise Refusal(
            f"the saved data state has training.shuffle = {state['shuffle']}, this run has {own['shuffle']}; "
            f"set training.shuffle = {str(state['shuffle']).lower()}"
        )
    if state["tokenizer_sha256"] != own["tokenizer_sha256"]:
        raise Refusal(
            "the saved data state belongs to another tokenizer, or an earlier version saved it; set "
            "model.hf_assets_path to the tokenizer that the run began with, or leave the place in the data out: "
            'checkpoint.exclude_from_loading = ["dataloader"]'
        )
    if len(state["sources"]) != len(own["sources"]):
        raise Refusal(
            f"the saved data state has {len(state['sources'])} sources, this run has {len(own['sources'])}: "
            f"{', '.join(names)}; resume with the same sources"
        )
    for name, saved, found in zip(names, state["sources"], own["sources"], strict=True):
        if saved != found:
            fix = "resume with the same data, or start another run in another job.dump_folder"
            if found.partition(", ")[0] == saved.partition(", ")[0]:  # the same text, divided otherwise (held_out.py)
                fix = "resume with validation.enable as it was, or start another run in another job.dump_folder"
            raise Refusal(f"{name} has {found}, but the saved data state was written for {saved}; {fix}")
    if missing := [number for number in own["streams"] if number not in state["streams"]]:
        raise Refusal(f"the saved data state lacks streams {', '.join(missing[:8])}; resume from another checkpoint")
