"""Two additions to torch's tensor parallelism: overlap its communication, and wait for an unfinished collective."""

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh


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
