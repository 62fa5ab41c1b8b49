"""Muon on matrices and stacks that ranks divide updates them as torch's does on one rank."""

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from tests.ranks import Ranks
from torchtitan.training.optimizer.muon import Muon

# Of six rows four ranks have 2, 2, 2 and none; five equal matrices are a batch of four and one more.
SIZES = [(6, 9)] * 5 + [(9, 6), (3, 6, 4)]
PLACES: list[tuple[Placement, ...]] = [
    (Shard(0), Replicate()), (Replicate(), Shard(1)), (Shard(0), Shard(1)), (Shard(1), Shard(0)), (Shard(0), Shard(0)),
]  # fmt: skip


def values(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator) for size in SIZES]


def update_on(rank: int, world_size: int) -> list[list[Tensor]]:
    meshes = [(init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b")), places) for places in PLACES]
    meshes += [(init_device_mesh("cpu", (4,)), (Shard(dim),)) for dim in (0, 1)]
    found = []
    for mesh, places in meshes:
        weights = [nn.Parameter(distribute_tensor(each, mesh, places)) for each in values(0)]
        muon = Muon(weights, 0.1, 0.1)
        for seed in (1, 2):
            for weight, gradient in zip(weights, values(seed), strict=True):
                weight.grad = distribute_tensor(gradient, mesh, places)
            muon.step()
        found.append([weight.full_tensor() for weight in weights if isinstance(weight, DTensor)])
    return found


def test_muon_of_divided_weights_updates_as_torchs_does(ranks: Ranks) -> None:
    weights = [[nn.Parameter(one) for one in (each if each.ndim == 3 else each[None])] for each in values(0)]
    muon = torch.optim.Muon([one for each in weights for one in each], 0.1, 0.1, adjust_lr_fn="match_rms_adamw")
    for seed in (1, 2):
        for each, gradients in zip(weights, values(seed), strict=True):
            for one, gradient in zip(each, gradients if gradients.ndim == 3 else gradients[None], strict=True):
                one.grad = gradient
        muon.step()
    for found in ranks(update_on, 4)[0]:
        for ours, theirs in zip(found, weights, strict=True):
            assert torch.equal(ours.view(-1, *ours.shape[-2:]), torch.stack(list(theirs)))
