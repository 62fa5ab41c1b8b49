"""What the ranks run; each function is called on every rank as `function(rank, world_size, ...)`."""

import math
import os
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from tests.tiny_runs import tiny_config, train_here
from torchtitan.config.layout import plan_batch, plan_layout
from torchtitan.data.tokenizer import build_tokenizer
from torchtitan.hardware import Place
from torchtitan.observe.health import NotFiniteError
from torchtitan.parallel import collectives
from torchtitan.parallel.mesh import build_mesh
from torchtitan.training import build
from torchtitan.training.loss import build_loss, cross_entropy_sum
from torchtitan.training.optimizer import apply_update, build_optimizer
from torchtitan.training.step import ForwardBackward


def train(rank: int, world_size: int, folder: str, overrides: dict[str, Any]) -> list[dict[str, Any]]:
    return train_here(tiny_config(folder, world_size, **overrides), Place(rank, rank, world_size))


def train_with_compiled_code_from(
    rank: int, world_size: int, folder: str, overrides: dict[str, Any], cache: str
) -> list[dict[str, Any]]:
    """Trains as a new process would: nothing compiled is there but what the folder holds."""
    torch._dynamo.reset()
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
    try:
        return train(rank, world_size, folder, overrides)
    finally:
        del os.environ["TORCHINDUCTOR_CACHE_DIR"]


def train_with_a_bad_batch(
    rank: int, world_size: int, folder: str, overrides: dict[str, Any], bad_rank: int, bad_step: int
) -> str:
    """Trains with a loss of NaN on one rank at one step; the message the run ends with, if it fails."""
    import train as recipe

    def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        summed = cross_entropy_sum(logits, labels)
        return summed * math.nan if (rank, calls) == (bad_rank, bad_step) else summed

    calls = 0
    build_plain_loss = recipe.build_loss
    recipe.build_loss = lambda compile_: loss  # type: ignore[assignment]
    try:
        train(rank, world_size, folder, overrides)
    except NotFiniteError as error:
        return str(error)
    finally:
        recipe.build_loss = build_plain_loss
    return ""


def parameters_after(
    rank: int, world_size: int, folder: str, steps: int, overrides: dict[str, Any]
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """All parameters, whole, after some steps, and this rank's shards of them."""
    config = tiny_config(folder, world_size, **overrides)
    dims = plan_layout(config.parallelism, world_size)
    plan = plan_batch(config.training, dims.dp)
    device = torch.device("cpu")
    collectives.start_process_group(device, rank, world_size, 60)
    mesh = build_mesh(dims, "cpu")
    tokenizer = build_tokenizer(config.model.hf_assets_path)
    loader = build.build_training_loader(config, plan, tokenizer, mesh, 0, device)
    model = build.build_model(config, build.build_model_args(config, tokenizer), mesh, device, 0)
    step = ForwardBackward(model, build_loss(config.compile), mesh, config.training.local_batch_size, False)
    optimizer = build_optimizer(model, config.optimizer)
    for _ in range(steps):
        batch = loader.next()
        assert batch is not None
        step(batch)
        apply_update(optimizer, 3e-3, collectives.clip_gradients(model, 1.0))
    loader.close()
    whole, local = {}, {}
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        whole[name] = parameter.full_tensor().detach().clone()
        local[name] = parameter.to_local().detach().clone()
    return whole, local
