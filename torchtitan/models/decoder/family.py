"""The decoder as the recipe sees it. A family replaces what is its own: the shape, the flavors and the files."""

import importlib
from functools import partial
from typing import Any

from torchtitan.models.decoder.args import DecoderArgs, parts, refusals, tied
from torchtitan.models.spec import Family


def _call(file: str, name: str, *given: Any) -> Any:
    """Import the decoder's file only now, so that a launcher or a planner reads shapes without torch."""
    return getattr(importlib.import_module(f"torchtitan.models.decoder.{file}"), name)(*given)


DECODER = Family(
    shape=DecoderArgs,
    parts=parts,
    build=partial(_call, "model", "Transformer"),
    initialize=partial(_call, "model", "initialize"),
    tensor_plan=partial(_call, "parallelize", "tensor_plan"),
    tied=tied,
    operations=partial(_call, "work", "operations"),
    takes_muon=lambda name: name.startswith("layers."),  # rows of embedding and output are tokens: not for Muon
    refusals=refusals,
)
