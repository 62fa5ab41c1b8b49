"""In what type a user's module computes: that of its weights, or what torch.autocast picks if forward mixes types."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from torchtitan.config.schema import Config
from torchtitan.models.own import Structure
from torchtitan.models.spec import ModelSpec
from torchtitan.observe.log import logger
from torchtitan.own_model.build import cast_parameters
from torchtitan.own_model.cut import kept
from torchtitan.own_model.derive import call_with
from torchtitan.own_model.samples import own_draws
from torchtitan.own_model.step import to_type
from torchtitan.refusal import Refusal, place_of


@contextmanager
def computing(model: nn.Module, known: Structure, config: Config, is_sharded: bool) -> Iterator[None]:
    """Inside, the whole module computes on a CPU as it will once FSDP holds its layers and converts their inputs."""
    held = getattr(torch, known.held(config).training.mixed_precision_param)
    layers = [model.get_submodule(part.name) for part in known.parts if part.kind == "layer"] if is_sharded else []

    def convert(_: nn.Module, args: Any, kwargs: Any) -> Any:
        return to_type((args, kwargs), held)

    handles = [layer.register_forward_pre_hook(convert, with_kwargs=True) for layer in layers]
    used = getattr(torch, config.training.mixed_precision_param)
    try:
        with torch.autocast("cpu", used) if known.mixes_types else nullcontext():
            yield
    finally:
        for handle in handles:
            handle.remove()


def in_its_type(
    spec: ModelSpec, model: nn.Module, known: Structure, batch: Any, config: Config, is_sharded: bool, on_cpu: bool
) -> Structure:
    """With the weights in the type of the run, unless forward mixes it with others, such as a buffer's."""
    failed: RuntimeError | None = None
    used = config.training.mixed_precision_param
    for tried in (known, replace(known, mixes_types=True)):
        held = tried.held(config).training.mixed_precision_param
        cast_parameters(model, held)
        inputs, target = to_type(batch[0], getattr(torch, held)), batch[1]
        try:
            with kept(model), own_draws("a type"), torch.no_grad(), computing(model, tried, config, is_sharded):
                call_with(model.train(), inputs) if spec.step is None else spec.step(model.train(), inputs, target)
        except RuntimeError as error:
            failed = failed or error
            continue
        if tried.mixes_types:
            logger.info(f"forward mixes {used} with other types, so weights are kept in {held} (torch.autocast)")
        return tried
    assert failed is not None
    what = f"forward fails in {used}{place_of(failed)}: {failed}"
    if on_cpu:
        raise Refusal(f'{what}; convert what it mixes, or set training.mixed_precision_param = "float32"')
    logger.info(f"on a CPU, {what}")
    cast_parameters(model, used)
    return known
