"""Data parallelism by FSDP2's fully_shard, also with replicas (HSDP)."""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from torchtitan.config.schema import Training
from torchtitan.parallel.parts import stays_whole


def apply_fsdp(
    model: nn.Module,
    units: list[list[nn.Module]],
    mesh: DeviceMesh,
    training: Training,
    reshard: Literal["default", "always", "never"],
    casts_inputs: bool = False,
    is_whole: bool = True,
    place: Callable[[nn.Parameter], Any] | None = None,
) -> None:
    """Shard each unit, and if `is_whole` the rest of the model as one more. Gradients are summed over ranks, no means.

    `reshard` says which units free their gathered parameters after forward. "default" frees all units but the last,
    because backward needs the last one first and would gather it again at once. On one rank "default" frees none,
    because the parameters would only be cast again. The caller may also free a unit whose backward needs no
    parameters. With `enable_cpu_offload` the shards stay on the host.
    """
    is_alone = mesh.size() == 1
    policy = MixedPrecisionPolicy(
        param_dtype=getattr(torch, training.mixed_precision_param),
        reduce_dtype=getattr(torch, training.mixed_precision_reduce),
        # A family's activations already have param_dtype; its float32 rotary table must keep its own.
        cast_forward_inputs=casts_inputs,
    )
    # A GPU copies pinned memory while it computes. On a CPU nothing is copied, so nothing needs pinning.
    pinned = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
    host = pinned if training.enable_cpu_offload else OffloadPolicy()
    whole = {p for p in model.parameters() if stays_whole(p)}  # own_model sums their gradients
    if is_alone and not training.enable_cpu_offload:  # frozen weights would only be copied
        whole |= {p for p in model.parameters() if not p.requires_grad and p.dtype == policy.param_dtype}
    options: dict[str, Any] = {"mp_policy": policy, "offload_policy": host, "ignored_params": whole}
    shard = functools.partial(fully_shard, mesh=mesh, shard_placement_fn=place, **options)
    others = {module for module in model.modules() if isinstance(module, FSDPModule)}  # over other ranks
    for unit in units:
        free = reshard == "always" or (reshard == "default" and not is_alone and unit is not units[-1])
        shard(unit if len(unit) > 1 else unit[0], reshard_after_forward=free)
    if is_whole:
        shard(model, reshard_after_forward=reshard == "always")
    shards = mesh.get_group(-1)
    shared = mesh.device_type == "cpu" and shards.size() > 1 and dist.get_backend(shards) == "gloo"
    if shared:
        from torchtitan.parallel.shared_memory import SharedGather, SharedReduceScatter

        gather, reduce_scatter = SharedGather(shards), SharedReduceScatter(shards)
    of_one = ReduceScatterOfOne()
    if mesh.device_type == "cuda":
        model.register_forward_pre_hook(lambda *_: of_one.free())
    for module in model.modules():
        if not isinstance(module, FSDPModule) or module in others:
            continue
        if not is_alone:  # on one rank these two would only divide by 1, in two more passes
            # The loss is already divided by the global number of tokens. gloo has no scaled sum, so force a plain SUM.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
        if shards.size() == 1:
            module.set_custom_reduce_scatter(of_one)  # type: ignore[arg-type]
        elif shared:
            module.set_custom_all_gather(gather)  # type: ignore[arg-type]
            module.set_custom_reduce_scatter(reduce_scatter)  # type: ignore[arg-type]


class ReduceScatterOfOne:
    """Reduce-scatter on one rank: input and output are one tensor, so FSDP's copy between them does nothing.

    On a GPU the computing stream fills the tensor and FSDP's stream reads it, so it is kept until the one has waited
    for the other. (`record_stream` would free it only once the GPU has got that far, and by then the host has allocated
    other memory for the next step.)
    """

    def __init__(self) -> None:
        self._input: Tensor | None = None
        self._kept: tuple[Tensor, torch.cuda.Stream] | None = None

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """FSDP calls this twice a reduction: in the computing stream for the input, in its own for the output."""
        output, self._input = self._input, None
        if output is None:
            self.free()
            output = self._input = torch.empty(*size, dtype=dtype, device=device)
        elif output.is_cuda:
            self._kept = output, torch.cuda.current_stream(device)
        return output

    def free(self) -> None:
        """Free the last tensor; called in the computing stream."""
        if self._kept is not None:
            tensor, stream = self._kept
            torch.cuda.current_stream(tensor.device).wait_stream(stream)
            self._kept = None

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, *_args: object, **_options: object) -> None:
        raise AssertionError("FSDP does not reduce over one rank")


@torch.no_grad()
def copy_first_replica(parameters: Iterable[nn.Parameter], replicas: DeviceMesh) -> None:
    """Copy the first replica's parameters to all: different kinds of device draw different initial values."""
    for parameter in parameters:
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter.data
        dist.broadcast(local, group=replicas.get_group(), group_src=0)
