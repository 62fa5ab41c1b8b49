"""Measure how much memory real training steps hold at most: the reference for the dry run's estimates."""

import ctypes
import gc
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.stored_models import VOCAB
from tests.tiny_runs import tiny_config
from torchtitan.config.schema import Config
from torchtitan.hardware import Place
from torchtitan.models.families import plan_model
from torchtitan.parallel import collectives
from torchtitan.tools.dry_run.estimate import blank_batch
from torchtitan.training.assemble import lay_out_ranks
from torchtitan.training.machine import check_machine
from torchtitan.training.optimizer import apply_update, build_optimizer

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # from malloc.h


def train(config: Config, world_size: int, device: torch.device, num_steps: int = 2) -> None:
    """Train on a batch of zeros; the second step has the optimizer's states. The process group must exist."""
    place = Place(dist.get_rank(), 0, world_size)
    run = lay_out_ranks(config, plan_model(config).with_vocabulary(VOCAB), place, device)
    model = run.build_model(seed=0)
    forward_backward = run.build_forward_backward(model)
    optimizer = build_optimizer(model.named_parameters(), config.optimizer)
    norm = collectives.GlobalNorm(run.mesh.stage_group)
    batch = blank_batch(config, run.blueprint, run.dims.dp).to(device)
    for _ in range(num_steps):
        forward_backward(batch)
        norm.add(*model.own_gradients())
        apply_update(optimizer, config.optimizer.lr, norm.total(), 1.0)


def peak_on_cpu(rank: int, world_size: int, overrides: dict[str, Any]) -> int:
    """The most bytes by which this rank's resident size grows; needs Linux and glibc."""
    libc, device = ctypes.CDLL("libc.so.6"), torch.device("cpu")
    libc.mallopt(_M_MMAP_THRESHOLD, 1 << 16)  # so that a freed tensor's memory returns to the system
    libc.mallopt(_M_TRIM_THRESHOLD, 0)
    check_machine(tiny_config("unused", world_size, **overrides), device)
    collectives.start_process_group(device, rank, world_size, 60)
    train(tiny_config("unused", world_size, **overrides), world_size, device, num_steps=1)  # torch keeps some of it
    gc.collect()
    libc.malloc_trim(0)
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    train(tiny_config("unused", world_size, **overrides), world_size, device)
    return _status("VmHWM") - before


def _status(name: str) -> int:
    """`VmRSS` is the resident size in bytes, `VmHWM` its peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name))
