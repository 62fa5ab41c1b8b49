"""The decoder with experts as the recipe sees it. A family replaces its own: the shape, the flavors and the files."""

import importlib
from dataclasses import replace
from functools import partial
from typing import Any

from torchtitan.models.decoder.family import DECODER
from torchtitan.models.experts.args import ExpertArgs, parts, refusals


def _call(file: str, name: str, *given: Any) -> Any:
    """Import the file only now, so that a launcher or a planner reads shapes without torch."""
    return getattr(importlib.import_module(f"torchtitan.models.experts.{file}"), name)(*given)


EXPERTS = replace(
    DECODER,
    shape=ExpertArgs,
    parts=parts,
    build=partial(_call, "model", "build"),
    initialize=partial(_call, "model", "initialize"),
    tensor_plan=partial(_call, "parallelize", "tensor_plan"),
    operations=partial(_call, "work", "operations"),
    takes_muon=lambda name: name.startswith("layers.") and ".router." not in name,  # its rows are experts
    refusals=refusals,
)
