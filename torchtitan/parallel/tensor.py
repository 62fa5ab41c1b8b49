"""Tensor parallelism: splits a model's weights by its family's plan, every key of which must match a module."""

import difflib
import re
import warnings
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.distributed.tensor.parallel.style import ParallelStyle

from torchtitan.models.spec import Blueprint
from torchtitan.observe.log import logger
from torchtitan.parallel.parts import tie
from torchtitan.refusal import Refusal


def split_tensors(
    model: nn.Module,
    blueprint: Blueprint,
    axis: DeviceMesh,
    loss_parallel: bool,
    names: Collection[str],
    split_sequence: bool = True,
) -> None:
    """Share the model's weights over the axis by its family's plan.

    Between layers, activations are split along the sequence; generation gives single tokens, which cannot be.
    """
    assert blueprint.spec.tensor_plan is not None, "models/rules.py refuses tensor parallelism without a plan"
    plan = match_plan(blueprint.spec.tensor_plan(blueprint.shape, split_sequence, loss_parallel), names)
    modules = dict(model.named_modules())
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    styles = {name: style for name, style in plan.items() if name in modules}
    inner = set()
    for layer in blueprint.layers:
        own = {name.removeprefix(f"{layer}."): style for name, style in styles.items() if name.startswith(f"{layer}.")}
        inner |= {f"{layer}.{name}" for name in own}
        if own and axis.device_type != "cpu":  # gloo carries no float8: on CPUs activations travel in their own type
            from torchtitan.parallel.float8 import float8_plan

            own = float8_plan(modules[layer], own)
        if own:
            parallelize_module(modules[layer], axis, own)
    ends = {name: style for name, style in styles.items() if name not in inner}
    parallelize_module(model, axis, ends)
    for name in ends:
        wait_for_output(modules[name])
    for module in modules.values():
        if hasattr(module, "split_adapter"):
            module.split_adapter()
    for name in frozen:  # some of torch's styles make a parameter anew, with a gradient
        model.get_parameter(name).requires_grad_(False)
    tie(model, blueprint.tied)  # both were split by rows, but as separate parameters
    left_out = [name for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor)]
    if split_sequence and left_out:
        raise Refusal(
            f"parallelism.tensor_parallel_degree = {axis.size()}, but nothing says how ranks share {left_out[0]}: each "
            f"would train it on its part of the sequence alone; give it a style in the family's tensor_plan, or use 1"
        )


def match_plan(plan: Mapping[str, ParallelStyle], names: Collection[str]) -> dict[str, ParallelStyle]:
    """The style of each module. In a key, `*` stands for one part of a name; a key without a module is refused."""
    matched: dict[str, ParallelStyle] = {}
    for key, style in plan.items():
        pattern = re.compile(re.escape(key).replace(r"\*", "[^.]+"))
        found = [name for name in names if pattern.fullmatch(name)]
        if not found:
            known = dict.fromkeys(re.sub(r"\.\d+(?=\.)", ".*", name) for name in names if name)
            near = difflib.get_close_matches(key, known, n=3, cutoff=0.0)
            raise Refusal(
                f'the tensor_plan splits "{key}", but the model has no such module, and ranks would each train all of '
                f"it; correct the key, for instance to {' or '.join(map(repr, near))}"
            )
        matched |= dict.fromkeys(found, style)
    return matched


def report_split(model: nn.Module, axis: DeviceMesh, is_whole: bool) -> None:
    """Log how many weights the ranks of the axis share; refuse a plan that makes them share none."""
    weights = list(model.parameters())
    split = sum(isinstance(w, DTensor) and any(p.is_shard() for p in w.placements) for w in weights)
    if not split and is_whole:
        raise Refusal(
            f"parallelism.tensor_parallel_degree = {axis.size()}, but the tensor_plan splits no weight; give a module "
            "a style such as ColwiseParallel() there, or use 1"
        )
    whose = "the model's" if is_whole else "its stages'"
    logger.info(f"tensor parallelism splits {split} of {whose} {len(weights)} weights over {axis.size()} ranks")


def overlap_communication(axis: DeviceMesh) -> None:
    """Have inductor cut the axis's gathers and scatters into pieces that run beside matrix products (GPUs only)."""
    from torch._inductor import config
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    config._micro_pipeline_tp = True
    with warnings.catch_warnings():
        # torch 2.13 warns that this call is deprecated and unneeded, but its compiler pass skips groups without it.
        warnings.simplefilter("ignore", FutureWarning)
        enable_symm_mem_for_group(axis.get_group().group_name)


class _Wait(torch.autograd.Function):
    """Wait for a collective and return its plain tensor; the gradient passes through unchanged."""

    @staticmethod
    def forward(_: Any, pending: AsyncCollectiveTensor) -> Tensor:
        return pending.wait()

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        return gradient


def wait_for_output(module: nn.Module) -> None:
    """Make the module return a plain tensor where its parallel style returns a collective that is still running.

    A compiled region treats such a pending tensor as one without gradient
    (https://github.com/pytorch/pytorch/pull/191113).
    """
    module.register_forward_hook(
        lambda _module, _inputs, output: _Wait.apply(output) if isinstance(output, AsyncCollectiveTensor) else output
    )
