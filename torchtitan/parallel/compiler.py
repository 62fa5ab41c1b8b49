"""Compiles the layers of a model by torch.compile, and refuses what the compiler cannot do."""

from collections.abc import Sequence

import torch
from torch import nn

from torchtitan.config.schema import Compile, Config
from torchtitan.parallel.mesh import Mesh
from torchtitan.refusal import Refusal


def check_compiler(config: Config, device: torch.device) -> None:
    backends = torch._dynamo.list_backends(None)
    if config.compile.backend not in backends:
        raise Refusal(
            f'compile.backend = "{config.compile.backend}" is no backend of torch.compile here; '
            f"use one of {', '.join(backends)}"
        )
    degree, recompute = config.parallelism.tensor_parallel_degree, config.activation_checkpoint
    whole = recompute.mode in ("selective", "full") and not recompute.by_operation
    if degree > 1 and whole and config.compile.model and device.type == "cpu":
        # torch swaps the random state, with which a CPU recomputes attention, and the mesh (docs/log.md).
        raise Refusal(
            f"compile.enable = true with tensor_parallel_degree = {degree} cannot recompute whole blocks on a CPU: "
            f'torch confuses what it saved of them; set activation_checkpoint.selective_ac_option = "op" with mode '
            f'"selective", or mode = "none"'
        )


def apply_compiler(
    model: nn.Module, layers: Sequence[str], mesh: Mesh, compile_: Compile, layers_differ: bool, in_one: bool = True
) -> None:
    """Compile each of the layers that this rank has, if the configuration names the model among the components.

    Not `in_one` piece are those with experts: the compiler stops at FSDP's hooks.
    """
    if mesh.dims.tp > 1:
        # The code compiled for split tensors depends on the rank, but its cache key does not. With another rank's code
        # a second run would train wrongly: https://github.com/pytorch/pytorch/issues/188390
        torch.compiler.config.cache_key_tag = f"rank {mesh.devices.get_rank()}"
    if not compile_.model:
        return
    if layers_differ:  # torch compiles 8 kinds of them unless told otherwise
        torch._dynamo.config.recompile_limit = max(8, 4 * len(layers))
    modules = dict(model.named_modules())
    for name in layers:
        if name in modules:
            modules[name].compile(backend=compile_.backend, fullgraph=in_one)
