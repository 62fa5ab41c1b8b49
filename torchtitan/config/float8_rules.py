"""Finds values that computing in float8 makes impossible."""

from collections.abc import Iterator

from torchtitan.config.schema import Config, Float8
from torchtitan.config.section import Finding


def find_float8_conflicts(config: Config, float8: Float8) -> Iterator[Finding]:
    name = "quantize.linear.float8"
    gather, precompute = f"{name}.enable_fsdp_float8_all_gather", f"{name}.precompute_float8_dynamic_scale_for_fsdp"
    filters, recipe, emulate = f"{name}.filter_fqns", f"{name}.recipe_name", f"{name}.emulate"
    if float8.emulate and config.compile.model:
        yield (
            (emulate, "compile.enable", "compile.components"),
            f"{emulate} = true computes as plain operations, which a compiled model cannot: set it to false, or remove "
            f'"model" from compile.components',
        )
    if "auto_filter_small_kn" in float8.filter_fqns and float8.recipe_name == "rowwise_with_gw_hp":
        yield (
            (filters, recipe),
            f'{filters} = ["auto_filter_small_kn"] has no sizes for recipe_name = "rowwise_with_gw_hp"; name the '
            f'layers to leave out, as ["output"], or use recipe "rowwise"',
        )
    if float8.precompute_float8_dynamic_scale_for_fsdp and not float8.enable_fsdp_float8_all_gather:
        yield (
            (precompute, gather),
            f"{precompute} = true needs the float8 all-gather; set enable_fsdp_float8_all_gather = true, or "
            f"{precompute} to false",
        )
    if float8.precompute_float8_dynamic_scale_for_fsdp and config.training.enable_cpu_offload:
        yield (
            (precompute, "training.enable_cpu_offload"),
            f"{precompute} = true with training.enable_cpu_offload = true has no effect: the scales are lost "
            f"when a weight is copied to the GPU; set one of the two to false",
        )
    if not float8.enable_fsdp_float8_all_gather:
        return
    if float8.recipe_name not in (None, "tensorwise"):
        yield (
            (gather, recipe),
            f'{gather} = true needs one scale for each tensor, but recipe_name = "{float8.recipe_name}" has one '
            f'for each row; use "tensorwise", or set it to false',
        )
