"""Measure how much memory real training steps hold at most: the reference for the dry run's estimates."""

import ctypes
import gc
from pathlib import Path
from typing import Any

import torch

from tests.tiny_runs import tiny_config
from torchtitan.config.layout import plan_layout
from torchtitan.config.schema import Config
from torchtitan.data.tokenizer import build_tokenizer
from torchtitan.parallel import collectives
from torchtitan.parallel.mesh import build_mesh
from torchtitan.planner.dry_run import blank_batch
from torchtitan.training import build
from torchtitan.training.loss import build_loss
from torchtitan.training.optimizer import apply_update, build_optimizer
from torchtitan.training.step import ForwardBackward

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # from malloc.h


def train_two_steps(config: Config, world_size: int, device: torch.device) -> None:
    """Train on a batch of zeros; the second step has the optimizer's states. The process group must exist."""
    dims = plan_layout(config.parallelism, world_size)
    mesh = build_mesh(dims, device.type)
    args = build.build_model_args(config, build_tokenizer(config.model.hf_assets_path))
    model = build.build_model(config, args, mesh, device, seed=0)
    forward_backward = ForwardBackward(
        model, build_loss(config.compile), mesh, config.training, config.parallelism, device
    )
    optimizer = build_optimizer(model.named_parameters(), config.optimizer)
    norm = collectives.GlobalNorm(mesh.stage_group)
    batch = blank_batch(config, dims.dp).to(device)
    for _ in range(2):
        forward_backward(batch)
        norm.add(*model.own_gradients())
        apply_update(optimizer, config.optimizer.lr, norm.total(), 1.0)


def peak_on_cpu(rank: int, world_size: int, overrides: dict[str, Any]) -> int:
    """The most bytes by which this rank's resident size grows; needs Linux and glibc."""
    libc, device = ctypes.CDLL("libc.so.6"), torch.device("cpu")
    libc.mallopt(_M_MMAP_THRESHOLD, 1 << 16)  # so that a freed tensor's memory returns to the system
    libc.mallopt(_M_TRIM_THRESHOLD, 0)
    build.check_environment(tiny_config("unused", world_size, **overrides), device)
    collectives.start_process_group(device, rank, world_size, 60)
    small = overrides | {"model__flavor": "tiny", "training__seq_len": 64}
    train_two_steps(tiny_config("unused", world_size, **small), world_size, device)  # loads the kernels' libraries
    gc.collect()
    libc.malloc_trim(0)
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    train_two_steps(tiny_config("unused", world_size, **overrides), world_size, device)
    return _status("VmHWM") - before


def _status(name: str) -> int:
    """`VmRSS` is the resident size in bytes, `VmHWM` its peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name))
