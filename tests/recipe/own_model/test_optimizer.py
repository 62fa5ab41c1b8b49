"""Optimizers that a ModelSpec gives: they update as they do alone, and what a checkpoint could not hold is refused."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.recipe.own_model import any_models
from tests.tiny_runs import read_records, tiny_config, train_here
from torchtitan.config.schema import Optimizer
from torchtitan.own_model.derive import derive
from torchtitan.own_model.optimizer import build_own
from torchtitan.parallel.parts import ModelParts
from torchtitan.refusal import Refusal
from torchtitan.training.optimizer import apply_update, make_states

SPEC, SECTION = any_models.MLP, Optimizer(lr=1e-2)


def built(function: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = SPEC.build()
    parts = ModelParts({0: model}, (0,), None, 0, 0)  # type: ignore[arg-type]
    known = derive(model, None, torch.randn(1, 8))
    return model, build_own(replace(SPEC, optimizer=function), known, parts, SECTION)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, scale: float = 1.0) -> None:
    (scale * F.cross_entropy(model(torch.ones(4, 8)), torch.arange(4) % 3)).backward()
    apply_update(optimizer, SECTION.lr / 2, torch.tensor(1.0), scale=scale)


def test_an_update_is_that_of_the_optimizer_alone_and_a_norm_that_is_not_finite_skips_it() -> None:
    def sgd(named: Any, section: Optimizer) -> torch.optim.Optimizer:
        parameters = [p for _, p in named]
        groups = [{"params": parameters[:2], "lr": 5 * section.lr}, {"params": parameters[2:]}]
        return torch.optim.SGD(groups, lr=section.lr, momentum=0.9, weight_decay=0.1)

    model, ours = built(sgd)
    make_states(ours)
    plain = SPEC.build()
    plain.load_state_dict(model.state_dict())
    theirs = sgd(list(plain.named_parameters()), SECTION)
    for group in theirs.param_groups:
        group["lr"] /= 2  # the schedule's factor
    for _ in range(3):
        step(model, ours, scale=4.0)
        F.cross_entropy(plain(torch.ones(4, 8)), torch.arange(4) % 3).backward()
        theirs.step()
        theirs.zero_grad()
    assert all(torch.allclose(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    kept = [p.detach().clone() for p in model.parameters()]
    apply_update(ours, SECTION.lr, torch.tensor(torch.nan))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), kept, strict=True))


class Counting(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["seen"] = group.get("seen", 0) + 1
            group["averaged"] += 1
            for parameter in group["params"]:
                self.state[parameter]["count"] = 1
        return super().step(closure)


def counting(key: str) -> Any:
    return lambda named, section: Counting([{"params": [p for _, p in named], "averaged": 0, "seen": 0}])


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (lambda named, section: None, "returns nothing; return a torch.optim.Optimizer"),
        (lambda named, section: [1], "returns int; return a torch.optim.Optimizer"),
        (lambda named, section: torch.optim.SGD([named[0][1]]), "0.bias is in no groups.*freeze it in build"),
        (lambda named, section: [torch.optim.SGD([p for _, p in named])] * 2, "0.weight is in 2 groups"),
        (lambda named, section: torch.optim.LBFGS([p for _, p in named]), "LBFGS, which calls the loss more than once"),
        (
            lambda named, section: torch.optim.SGD([*(p for _, p in named), nn.Parameter(torch.ones(1))]),
            "1 of its parameters are not of those",
        ),
        (lambda named, section: torch.optim.SGD(named[0]), "optimizer of the ModelSpec fails at .*TypeError"),
        (counting("seen"), "changes averaged of its groups"),
    ],
)
def test_what_cannot_train_or_be_saved_is_refused(function: Any, says: str) -> None:
    with pytest.raises(Refusal, match=says):
        step(*built(function))


def test_a_state_that_is_no_tensor_is_refused() -> None:
    class Keeping(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            self.state[self.param_groups[0]["params"][0]]["count"] = 1

    with pytest.raises(Refusal, match="keeps count as a int; make it a tensor"):
        step(*built(lambda named, section: Keeping([p for _, p in named])))


def test_the_schedule_is_a_function_of_the_step(tmp_path: Any) -> None:
    name = "tests.recipe.own_model.any_models:OPTIMIZERS"
    train_here(tiny_config(tmp_path, model__name=name, training__epochs=-1, training__steps=4))
    rates = [record["lr"] for record in read_records(tmp_path)]
    assert rates == pytest.approx([1e-2 * 0.5 ** (step / 4) for step in (1, 2, 3, 4)], rel=1e-3)
