"""Linear layers in float8, by torchao: replaced before anything is split, gathered in float8 if asked for.

Optional: torchao is imported inside the functions, and `check_float8` refuses what is missing before training starts.
"""

import dataclasses
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
    """Refuse to compute in float8 without the package or the hardware for it."""
    try:
        import torchao.float8  # noqa: F401
    except ImportError as error:
        raise Refusal(
            f'model.converters = ["quantize.linear.float8"] needs the package torchao ({error}); '
            f"pip install 'torchao>=0.18', or remove it from model.converters"
        ) from None
    if config.emulate or (device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)):
        return
    raise Refusal(
        "quantize.linear.float8 needs a GPU that multiplies in float8 (compute capability 8.9 or more); remove it from "
        "model.converters, or test it with quantize.linear.float8.emulate = true"
    )


def apply_float8(model: nn.Module, config: Float8, compiled: bool) -> None:
    """Exchange a model's linear layers; parameters keep their names."""
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
        # Fused casts that skip a rounding disagree with eager: https://github.com/pytorch/pytorch/issues/150859
        inductor_config.emulate_precision_casts = True
    convert_to_float8_training(model, config=options, module_filter_fn=_layer_filter(recipe, config.filter_fqns))
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    changed = sum(isinstance(linear, Float8Linear) for linear in linears)
    if not changed:
        raise Refusal(
            f"quantize.linear.float8.filter_fqns = {config.filter_fqns} leaves no layer of this model to compute in "
            f"float8; name fewer, or remove it from model.converters"
        )
    logger.info(f"float8 ({recipe}): {changed} of {len(linears)} linear layers")


def _layer_filter(recipe: str, names: list[str]) -> Callable[[nn.Module, str], bool]:
    """Which layers to replace: those not named, and of sizes that the kernels can take."""
    named = [name for name in names if name != _AUTO_FILTER]
    if len(named) < len(names):
        from torchao.float8 import _auto_filter_for_recipe

        return _auto_filter_for_recipe(recipe, filter_fqns=named)

    def takes(module: nn.Module, name: str) -> bool:
        fits = isinstance(module, nn.Linear) and all(size % 16 == 0 for size in module.weight.shape)
        return fits and not any(part in name for part in named)

    return takes


def float8_plan(module: nn.Module, plan: dict[str, ParallelStyle]) -> dict[str, ParallelStyle]:
    """A tensor-parallel plan with torchao's styles, which communicate in float8, wherever the layers can take that."""
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
    """Whether a layer was replaced by one with a single scale a tensor; one a row cannot be gathered in float8."""
    config = getattr(linear, "config", None)
    return config is not None and config.cast_config_input.scaling_granularity.value == "tensorwise"


def update_float8_scales(stages: Iterable[nn.Module], config: Float8 | None) -> None:
    """After an optimizer step, if asked for: the scales of all weights in one reduction, for the next gathers."""
    if config is not None and config.precompute_float8_dynamic_scale_for_fsdp:
        from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

        for stage in stages:
            precompute_float8_dynamic_scale_for_fsdp(stage)
