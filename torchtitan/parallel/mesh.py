"""The one DeviceMesh: always the same five axes, so that every mechanism asks for its axis by name."""

from dataclasses import dataclass

from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from torchtitan.config.layout import AXES, ParallelDims


@dataclass(frozen=True)
class Mesh:
    """The devices of a run, and the slices of them its mechanisms work on."""

    dims: ParallelDims
    devices: DeviceMesh
    batch: DeviceMesh  # ranks that see different sequences
    tokens: DeviceMesh  # ranks that see different tokens: other sequences, or other parts of them
    losses: DeviceMesh  # these on all stages of the pipeline, who add up what the last stages know of the loss
    shards: DeviceMesh  # ranks that share the parameters of one replica among them

    @property
    def fsdp(self) -> DeviceMesh:
        """What parameters are sharded over; two-dimensional, replicas first, where there are replicas (HSDP)."""
        if self.dims.dp_replicate > 1:
            return self.devices["dp_replicate", self.shards.mesh_dim_names[0]]  # type: ignore[index]
        return self.shards

    @property
    def groups(self) -> list[ProcessGroup]:
        """Every process group that communicates over some slice."""
        return [
            *self.devices.get_all_groups(),
            *(m.get_group() for m in (self.batch, self.tokens, self.losses, self.shards)),
        ]

    @property
    def stage_group(self) -> ProcessGroup:
        """Ranks that hold different stages of the pipeline for the same data."""
        return self.devices.get_group("pp")


def build_mesh(dims: ParallelDims, device_type: str) -> Mesh:
    """Lay the ranks out; the process group must be up."""
    devices = init_device_mesh(device_type, dims.sizes, mesh_dim_names=AXES)
    batch = devices["dp_replicate", "dp_shard"]._flatten("batch")
    tokens = devices["dp_replicate", "dp_shard", "cp"]._flatten("tokens")
    losses = devices["pp", "dp_replicate", "dp_shard", "cp"]._flatten("losses") if dims.pp > 1 else tokens
    # Context-parallel ranks hold the same parameters for other tokens, which is what data-parallel ranks do.
    shards = devices["dp_shard", "cp"]._flatten("dp_shard_cp") if dims.cp > 1 else devices["dp_shard"]
    return Mesh(dims, devices, batch, tokens, losses, shards)
