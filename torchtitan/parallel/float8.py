"""Linear layers in float8, from torchao. They replace the plain layers before anything is split over ranks.

torchao is optional: only functions import it, and `check_float8` refuses a missing package before training starts.
"""

import dataclasses
import re
from collections.abc import Callable, Iterable

import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel
from torch.distributed.tensor.parallel.style import ParallelStyle

from torchtitan.config.schema import Float8
from torchtitan.observe.log import logger
from torchtitan.refusal import Refusal

_AUTO_FILTER = "auto_filter_small_kn"


def check_float8(config: Float8, device: torch.device) -> None:
    """Refuse float8 if torchao is not installed or the device does not multiply in float8."""
    try:
        import torchao.float8  # noqa: F401
    except ImportError as error:
        raise Refusal(
            f'model.converters = ["quantize.linear.float8"] needs the package torchao ({error}); '
            f"pip install 'torchao>=0.18', or remove quantize.linear.float8 from model.converters"
        ) from None
    if config.emulate or (device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)):
        return
    raise Refusal(
        f'model.converters = ["quantize.linear.float8"] on {device.type}: quantize.linear.float8 needs a GPU that '
        f"multiplies in float8 (compute capability 8.9 or more); remove it from model.converters, or set "
        f"quantize.linear.float8.emulate = true to test it"
    )


def apply_float8(model: nn.Module, config: Float8, compiled: bool) -> None:
    """Replace the model's linear layers by float8 ones. Parameters keep their names."""
    from torch._inductor import config as inductor_config
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    from torchao.float8.float8_linear import Float8Linear

    recipe = config.recipe_name or "tensorwise"
    options = dataclasses.replace(
        Float8LinearConfig.from_recipe_name(recipe),
        enable_fsdp_float8_all_gather=config.enable_fsdp_float8_all_gather,
        emulate=config.emulate,
    )
    if compiled and recipe == "rowwise":
        # Without it fused casts skip a rounding and differ from eager: https://github.com/pytorch/pytorch/issues/150859
        inductor_config.emulate_precision_casts = True
    convert_to_float8_training(model, config=options, module_filter_fn=_layer_filter(recipe, config.filter_fqns))
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    for part in config.filter_fqns:
        if part != _AUTO_FILTER and not any(part in name for name in linears):
            kinds = ", ".join(dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in linears))
            raise Refusal(
                f'quantize.linear.float8.filter_fqns names "{part}", which is in no linear layer\'s name, so it leaves '
                f"none out; correct it, the layers are {kinds}"
            )
    changed = sum(isinstance(linear, Float8Linear) for linear in linears.values())
    if not changed:
        raise Refusal(
            f"quantize.linear.float8.filter_fqns = {config.filter_fqns} leaves no layer of this model to compute in "
            f"float8; name fewer layers, or remove quantize.linear.float8 from model.converters"
        )
    logger.info(f"float8 ({recipe}): {changed} of {len(linears)} linear layers compute in float8")


def _layer_filter(recipe: str, names: list[str]) -> Callable[[nn.Module, str], bool]:
    """Return a test that picks the layers to replace: not excluded by name, and of a size that the kernels accept."""
    named = [name for name in names if name != _AUTO_FILTER]
    if len(named) < len(names):
        from torchao.float8 import _auto_filter_for_recipe

        return _auto_filter_for_recipe(recipe, filter_fqns=named)

    def takes(module: nn.Module, name: str) -> bool:
        fits = isinstance(module, nn.Linear) and all(size % 16 == 0 for size in module.weight.shape)
        return fits and not any(part in name for part in named)

    return takes


def float8_plan(module: nn.Module, plan: dict[str, ParallelStyle]) -> dict[str, ParallelStyle]:
    """Return the tensor-parallel plan with torchao's styles, which send float8, for the layers that can receive it."""
    can = {name for name in plan if _has_one_scale(module.get_submodule(name))}
    if not can:
        return plan
    from torchao.float8 import float8_tensor_parallel as torchao

    changed = dict(plan)
    for name, style in plan.items():
        if isinstance(style, PrepareModuleInput):
            takers = {inner for inner, s in plan.items() if inner.startswith(f"{name}.") and type(s) is ColwiseParallel}
            if takers <= can:
                changed[name] = torchao.PrepareFloat8ModuleInput(
                    input_layouts=style.input_layouts, desired_input_layouts=style.desired_input_layouts
                )
        elif name in can and isinstance(style, (ColwiseParallel, RowwiseParallel)):
            columns = isinstance(style, ColwiseParallel)
            changed[name] = (torchao.Float8ColwiseParallel if columns else torchao.Float8RowwiseParallel)(
                input_layouts=style.input_layouts[0],
                output_layouts=style.output_layouts[0],
                use_local_output=style.use_local_output,
            )
    return changed


def _has_one_scale(linear: nn.Module) -> bool:
    """True for a float8 layer with one scale a tensor. Tensors with one scale a row cannot be gathered in float8."""
    config = getattr(linear, "config", None)
    return config is not None and config.cast_config_input.scaling_granularity.value == "tensorwise"


def update_float8_scales(stages: Iterable[nn.Module], config: Float8 | None) -> None:
    """Compute the scales of all weights for the next gathers in one reduction, if the config asks for it.

    Call it after every optimizer step.
    """
    if config is not None and config.precompute_float8_dynamic_scale_for_fsdp:
        from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

        for stage in stages:
            precompute_float8_dynamic_scale_for_fsdp(stage)
