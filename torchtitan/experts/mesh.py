"""The ranks of a run, laid out for experts: the same ranks as the run's mesh, with other axes inside a stage.

At the door of the experts all ranks of a stage hold different tokens: other sequences, other parts of the same ones
(CP), or other positions (TP splits the sequence between layers). So experts divide over any of them.
"""

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from torchtitan.config.layout import ParallelDims


def build_expert_mesh(dims: ParallelDims, device_type: str) -> DeviceMesh:
    """Neighbours share the experts (`ep`), and FSDP divides each expert over the other ranks of a replica."""
    in_replica = dims.dp_shard * dims.cp * dims.tp
    sizes = dims.pp, dims.dp_replicate, in_replica // dims.ep, dims.ep
    return init_device_mesh(device_type, sizes, mesh_dim_names=("pp", "dp_replicate", "expert_shard", "ep"))
