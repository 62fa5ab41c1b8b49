"""Divides the experts of a model over ranks: whole ones over the axis `ep`, and each over the rest by FSDP."""

from collections.abc import Iterator
from typing import Literal

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from torchtitan.config.schema import Training
from torchtitan.experts.exchange import EveryRank, Exchange
from torchtitan.models.mixture import Experts, MixtureOfExperts
from torchtitan.parallel.fsdp import apply_fsdp
from torchtitan.parallel.mesh import Mesh
from torchtitan.parallel.recompute import Aside


def mixtures(model: nn.Module) -> Iterator[MixtureOfExperts]:
    return (module for module in model.modules() if isinstance(module, MixtureOfExperts))


def divide_experts(model: nn.Module, axis: DeviceMesh) -> None:
    """Leave each rank its experts, and let tokens travel to theirs."""
    for mixture in mixtures(model):
        _split(mixture.experts, axis)
        if axis.size() > 1:
            mixture.exchange = Exchange(axis.get_group())


def divide_for_generation(model: nn.Module, axis: DeviceMesh) -> None:
    """The same where all ranks of the axis have all tokens; experts that do not divide stay whole."""
    for mixture in mixtures(model):
        if len(mixture.counts) % axis.size() == 0:
            _split(mixture.experts, axis)
            mixture.exchange = EveryRank(axis.get_group())


def _split(experts: Experts, axis: DeviceMesh) -> None:
    for name, weight in list(experts.named_parameters()):
        part = distribute_tensor(weight.detach(), axis, [Shard(0)])
        setattr(experts, name, nn.Parameter(part, requires_grad=weight.requires_grad))


def shard_experts(
    model: nn.Module, mesh: Mesh, training: Training, reshard: Literal["default", "always", "never"]
) -> None:
    """Let FSDP gather the experts of a layer apart from the rest of it, over their own ranks."""
    ranks = mesh.fsdp
    if mesh.experts is not None:
        ranks = mesh.experts["expert_shard"]
        if mesh.dims.dp_replicate > 1:
            ranks = mesh.experts["dp_replicate", "expert_shard"]
    size = ranks.size(-1)

    def place(weight: nn.Parameter) -> Shard:
        """By experts where they divide evenly, else by the first dim that does, so that no rank has nothing."""
        local = getattr(weight, "_local_tensor", weight)
        return Shard(next((dim for dim, length in enumerate(local.shape) if length % size == 0), 0))

    units: list[list[nn.Module]] = [[mixture.experts] for mixture in mixtures(model)]
    if units:
        apply_fsdp(model, units, ranks, training, reshard, is_whole=False, place=place)
    for (experts,) in units:
        for hooks in (experts._forward_pre_hooks, experts._forward_hooks):
            hooks.update({key: Aside(hook) for key, hook in hooks.items()})
