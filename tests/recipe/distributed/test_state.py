"""A module with state of every kind trains, resumes and is saved as plain torch would train it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.ranks import Ranks
from tests.recipe.distributed import cases
from tests.recipe.distributed.test_any_model import keys
from tests.recipe.distributed.test_layouts import seldom
from tests.recipe.own_model import any_models
from tests.tiny_runs import tiny_config
from torchtitan.__main__ import main
from torchtitan.checkpoint.storage import Storage
from torchtitan.data.draws import seed_draws
from torchtitan.training.optimizer.lr_schedule import learning_rate_factor
from torchtitan.weights.checkpoint import open_checkpoint

STEPS = 4
RUN = {
    "validation__enable": False,
    "training__shuffle": False,
    "training__global_batch_size": 8,
    "checkpoint__enable": True,
    "checkpoint__interval": 2,
    "lr_scheduler__total_steps": STEPS,
}
PIPELINE = {"pp": 2, "schedule": "GPipe", "parallelism__pipeline_parallel_layer_counts": [1, 2]}

# processes, ranks of data, stages, and the configuration
LAYOUTS: dict[str, tuple[int, int, int, dict[str, Any]]] = {
    "FSDP 2": (2, 2, 1, keys("FROZEN_STATE", 4)),
    "PP 2": (2, 1, 2, keys("STATE", size=8, **PIPELINE)),
    "PP 2 x FSDP 2": (4, 2, 2, keys("FROZEN_STATE", 4, size=4, **PIPELINE)),
}
MODES: dict[str, dict[str, Any]] = {
    "none": {"activation_checkpoint__mode": "none"},
    "full": {"activation_checkpoint__mode": "full"},
    "by operation": {"activation_checkpoint__mode": "selective", "activation_checkpoint__selective_ac_option": "op"},
}
COMPILED = {"compile__enable": True, "compile__components": ["model"], "compile__backend": "aot_eager"}


def train_in_plain_torch(name: str, ranks_of_data: int, stages: int) -> tuple[list[float], dict[str, Tensor]]:
    """The losses and the state, with the random numbers that each rank of the layout draws."""
    config = tiny_config("unused", **RUN | {"training__steps": STEPS})
    torch.manual_seed(0)
    model = getattr(any_models, name).build().train()
    optimizer = torch.optim.AdamW(
        model.parameters(),
        betas=(config.optimizer.beta1, config.optimizer.beta2),
        eps=config.optimizer.eps,
        weight_decay=config.optimizer.weight_decay,
    )
    place = [0, 0, 0]  # step, rank of data, stage

    def seed() -> None:
        seed_draws(f"0 step {place[0]} place {(place[1], place[2])}")

    def enter_second_stage(*_: object) -> None:
        if stages > 1:
            place[2] = 1
            seed()

    model.blocks[1].register_forward_pre_hook(enter_second_stage)
    inputs, labels = any_models.classes().tensors  # type: ignore[attr-defined]
    losses = []
    for step in range(1, STEPS + 1):
        batch = slice(8 * step - 8, 8 * step)
        before = {key: buffer.clone() for key, buffer in model.named_buffers()}
        total = 0.0
        for rank, (x, y) in enumerate(zip(*(t[batch].chunk(ranks_of_data) for t in (inputs, labels)), strict=True)):
            for key, buffer in model.named_buffers():
                buffer.copy_(before[key])
            place[:] = step, rank, 0
            seed()
            loss = F.cross_entropy(model(x), y, reduction="sum") / 8
            loss.backward()
            total += loss.item()
        losses.append(total)
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.training.max_norm)
        for group in optimizer.param_groups:
            group["lr"] = config.optimizer.lr * learning_rate_factor(step, config.lr_scheduler, STEPS)
        optimizer.step()
        optimizer.zero_grad()
    return losses, dict(model.named_parameters()) | dict(model.named_buffers())


@pytest.mark.parametrize("layout", seldom(LAYOUTS, ("FSDP 2", "PP 2 x FSDP 2")))
def test_recompute_compiler_and_resume_leave_losses_and_state_as_in_plain_torch(
    ranks: Ranks, tmp_path: Path, layout: str
) -> None:
    world_size, ranks_of_data, stages, overrides = LAYOUTS[layout]
    compiled = {"by operation, compiled": MODES["by operation"] | COMPILED} if layout != "PP 2 x FSDP 2" else {}
    for run, more in (MODES | compiled).items():
        name = overrides["model__name"]
        losses, state = train_in_plain_torch(name.rpartition(":")[2], ranks_of_data, stages)
        folder = tmp_path / run.replace(" ", "_")
        for steps in (2, STEPS) if run in ("none", "full") else (STEPS,):  # with a resume, or without
            config = overrides | RUN | more | {"model__name": name, "training__steps": steps}
            records = ranks(cases.train, world_size, str(folder), config)[0]
        assert [record["loss"] for record in records] == pytest.approx(losses, rel=1e-5), run
        saved = open_checkpoint(Storage(str(folder / "checkpoint")), STEPS)
        assert set(saved.outline) == set(state)
        for key, tensor in state.items():
            assert torch.allclose(saved.read(key), tensor.detach(), rtol=1e-4, atol=1e-5), (run, key)
        if run == "full":
            leaves_as_it_is(folder, name.rpartition(":")[2], state)


def leaves_as_it_is(folder: Path, name: str, state: dict[str, Tensor]) -> None:
    """What `export` writes fills the user's own class, and holds what training left."""
    from safetensors.torch import load_file

    main(["export", str(folder), str(folder / "out")])
    model = getattr(any_models, name).build()
    model.load_state_dict(load_file(folder / "out/model.safetensors"))
    for key, tensor in model.state_dict().items():
        if key in state:
            torch.testing.assert_close(tensor, state[key].detach(), rtol=1e-4, atol=1e-5)
    assert int(model.blocks[1].second.count) == 2 * STEPS
