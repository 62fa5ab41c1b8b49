"""Tensor parallelism: a plan of which module is split how, and a loss on logits split over the vocabulary."""

from contextlib import AbstractContextManager, nullcontext

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import loss_parallel, parallelize_module
from torch.distributed.tensor.parallel.style import ParallelStyle


def apply_tensor_parallel(module: nn.Module, axis: DeviceMesh, plan: dict[str, ParallelStyle]) -> None:
    """Split the module's children as the plan says; on one rank nothing is to be split."""
    if axis.size() > 1:
        parallelize_module(module, axis, plan)


def split_logits(axis: DeviceMesh, disabled: bool) -> AbstractContextManager:
    """Where loss and backward run, if logits stay split over the vocabulary."""
    return nullcontext() if disabled or axis.size() == 1 else loss_parallel()
