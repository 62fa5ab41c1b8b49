"""The most memory that tensors of real steps hold: python -m tests.measured_peak WORLD_SIZE KEY=VALUE ...

Prints the growth of rank 0's resident size in bytes. malloc must give memory back at once, see ENVIRONMENT. Linux only.
"""

import os
import sys
from pathlib import Path

import torch

from tests.tiny_runs import tiny_config
from torchtitan.config.layout import plan_batch, plan_layout
from torchtitan.config.schema import Config
from torchtitan.data.tokenizer import build_tokenizer
from torchtitan.parallel import collectives
from torchtitan.parallel.mesh import build_mesh
from torchtitan.training import build
from torchtitan.training.dry_run import _batch
from torchtitan.training.loss import build_loss
from torchtitan.training.optimizer import apply_update, build_optimizer
from torchtitan.training.step import ForwardBackward

ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0", "OMP_NUM_THREADS": "1"}
DEVICE = torch.device("cpu")


def resident(line: str) -> int:
    """`VmRSS` is the resident size in bytes, `VmHWM` the largest since it was last reset."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(next(row for row in status.splitlines() if row.startswith(line)).split()[1])


def steps(config: Config, world_size: int) -> None:
    """Two optimizer steps on zeros, the second with the optimizer's states."""
    dims = plan_layout(config.parallelism, world_size)
    mesh = build_mesh(dims, DEVICE.type)
    args = build.build_model_args(config, build_tokenizer(config.model.hf_assets_path))
    model = build.build_model(config, args, mesh, DEVICE, 0)
    forward_backward = ForwardBackward(
        model, build_loss(config.compile), mesh, config.training, config.parallelism, DEVICE
    )
    optimizer = build_optimizer(model.parameters(), config.optimizer)
    batch = _batch(config, plan_batch(config.training, dims.dp).global_batch_size // dims.dp)
    for _ in range(2):
        forward_backward(batch)
        apply_update(
            optimizer, 1e-3, collectives.clip_gradients(model.parameters(), 1.0, mesh.stage_group, model.copy())
        )


def main(world_size: int, overrides: dict[str, str]) -> None:
    rank = int(os.environ.get("RANK", 0))
    collectives.start_process_group(DEVICE, rank, world_size, 60)
    steps(tiny_config("unused", world_size), world_size)  # loads what kernels and libraries need
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    steps(tiny_config("unused", world_size, **overrides), world_size)
    if rank == 0:
        print(resident("VmHWM") - before)
    collectives.stop_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), dict(argument.split("=") for argument in sys.argv[2:]))
