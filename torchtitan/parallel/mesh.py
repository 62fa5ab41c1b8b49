"""Builds the run's only DeviceMesh. It always has the same five axes, so every mechanism asks for its axis by name."""

from dataclasses import dataclass

from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from torchtitan.config.layout import AXES, ParallelDims


@dataclass(frozen=True)
class Mesh:
    """The ranks of a run, and the slices of them that each mechanism works on."""

    dims: ParallelDims
    devices: DeviceMesh
    batch: DeviceMesh  # ranks that see different sequences
    tokens: DeviceMesh  # ranks that see different tokens: other sequences, or other parts of the same ones
    losses: DeviceMesh  # `tokens` on all pipeline stages: they sum the loss, to which only the last stage adds
    shards: DeviceMesh  # ranks that together hold the parameters of one replica
    experts: DeviceMesh | None = None  # the same ranks with the axes of experts, where these are others

    @property
    def fsdp(self) -> DeviceMesh:
        """The mesh for fully_shard: one-dimensional, or with replicas (HSDP) two-dimensional, replicas first."""
        if self.dims.dp_replicate > 1:
            return self.devices["dp_replicate", self.shards.mesh_dim_names[0]]  # type: ignore[index]
        return self.shards

    @property
    def groups(self) -> list[ProcessGroup]:
        """All process groups of the mesh and its slices."""
        return [
            *self.devices.get_all_groups(),
            *(m.get_group() for m in (self.batch, self.tokens, self.losses, self.shards)),
            *(self.experts.get_all_groups() if self.experts else ()),
        ]

    @property
    def stage_group(self) -> ProcessGroup:
        """The ranks that hold different pipeline stages for the same data."""
        return self.devices.get_group("pp")


def build_mesh(dims: ParallelDims, device_type: str, experts: DeviceMesh | None = None) -> Mesh:
    """Lay the ranks out. The process group must already be started."""
    devices = init_device_mesh(device_type, dims.sizes, mesh_dim_names=AXES)
    batch = devices["dp_replicate", "dp_shard"]._flatten("batch")
    tokens = devices["dp_replicate", "dp_shard", "cp"]._flatten("tokens")
    losses = devices["pp", "dp_replicate", "dp_shard", "cp"]._flatten("losses") if dims.pp > 1 else tokens
    # Context-parallel ranks use the same parameters on other tokens, as data-parallel ranks do, so both share them.
    shards = devices["dp_shard", "cp"]._flatten("dp_shard_cp") if dims.cp > 1 else devices["dp_shard"]
    return Mesh(dims, devices, batch, tokens, losses, shards, experts)
