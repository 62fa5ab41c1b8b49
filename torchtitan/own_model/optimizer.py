"""Lets the optimizers that a ModelSpec gives update a model on any layout, and be saved as the recipe's own is."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torchtitan.config.schema import Optimizer as Section
from torchtitan.models.own import Structure
from torchtitan.models.spec import ModelSpec
from torchtitan.observe.log import logger
from torchtitan.parallel.parts import ModelParts
from torchtitan.refusal import Refusal, blaming
from torchtitan.training.optimizer.apply import divide_gradients
from torchtitan.training.optimizer.build import split_groups


class OwnOptimizer(torch.optim.Optimizer):
    """One or more optimizers, each with parameters of its own, behind one."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.optimizers, self._was_checked = optimizers, False
        super().__init__([group for each in optimizers for group in each.param_groups], {})
        self.defaults = {"fused": True}  # `apply_update` leaves dividing and skipping to `step`
        for each in optimizers:  # they share the groups and the states, so a rate that is set here reaches them
            self.state.update(each.state)
            each.state = self.state

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        applies = 1 - self.found_inf  # type: ignore[attr-defined]
        if not applies:  # in a dry run, every value that is read is 1
            return
        divide_gradients(self, self.grad_scale)  # type: ignore[attr-defined]
        before = None if self._was_checked else [_options(group) for group in self.param_groups]
        for each in self.optimizers:
            with blaming("a step of the ModelSpec's optimizer"):
                each.step()
        if before is not None and self.state:
            self._check(before)

    def _check(self, before: Sequence[Mapping[str, Any]]) -> None:
        """After a first update: a checkpoint holds only states that are tensors, in the layout of their parameter."""
        self._was_checked = True
        for then, group in zip(before, self.param_groups, strict=True):
            if changed := [key for key, value in _options(group).items() if then.get(key, value) != value]:
                raise Refusal(
                    f"the ModelSpec's optimizer changes {changed[0]} of its groups, which no checkpoint holds; keep "
                    "what changes in tensors of `state`, by parameter"
                )
        for parameter, state in self.state.items():
            for key, value in state.items():
                is_part = isinstance(parameter, DTensor) and not isinstance(value, DTensor)
                if not isinstance(value, Tensor):
                    fault = f"a {type(value).__name__}; make it a tensor"
                elif is_part and value.numel() > 1:
                    fault = "the part of one rank; make it as torch.zeros_like(parameter), which knows all parts"
                else:
                    continue
                raise Refusal(f"the ModelSpec's optimizer keeps {key} as {fault}, which a checkpoint can hold")


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if isinstance(value, int | float | str) and key != "lr"}


def build_own(spec: ModelSpec, known: Structure, model: ModelParts, section: Section) -> OwnOptimizer:
    """Each rank gives the ModelSpec's function all parameters, with stand-ins for those that only other stages have."""
    held: dict[str, list[nn.Parameter]] = {}  # a tied weight has a copy in each stage that needs it
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            held.setdefault(known.saved_name(name), []).append(parameter)
    given = {name: nn.Parameter(torch.empty(size, device="meta")) for name, size in known.trained.items()}
    given |= {name: parameters[0] for name, parameters in held.items()}
    assert spec.optimizer is not None
    with blaming("optimizer of the ModelSpec"):
        made = spec.optimizer(list(given.items()), section)
    optimizers = [made] if isinstance(made, torch.optim.Optimizer) else list(made) if made is not None else []
    _check_made(optimizers, given)
    names = {id(parameter): name for name, parameter in given.items()}
    for each in optimizers:
        for group in each.param_groups:
            group["relative_rate"] = float(group.get("lr", section.lr)) / section.lr
            group["params"] = [own for p in group["params"] for own in held.get(names[id(p)], [])]
        for parameter, state in list(each.state.items()):  # some make their states when they are made
            del each.state[parameter]
            for own in held.get(names[id(parameter)], []):
                each.state[own] = {k: v.clone() if isinstance(v, Tensor) else v for k, v in state.items()}
        each.param_groups = split_groups(each.param_groups)
    rates = ", ".join(
        dict.fromkeys(f"{group.get('lr', section.lr):.3g}" for o in optimizers for group in o.param_groups)
    )
    logger.info(f"optimizer: {', '.join(type(each).__name__ for each in optimizers)}, at rates of {rates}")
    return OwnOptimizer(optimizers)


def _check_made(optimizers: Sequence[Any], given: Mapping[str, nn.Parameter]) -> None:
    where = "optimizer of the ModelSpec"
    if not optimizers or not all(isinstance(each, torch.optim.Optimizer) for each in optimizers):
        kinds = ", ".join(type(each).__name__ for each in optimizers) or "nothing"
        raise Refusal(f"{where} returns {kinds}; return a torch.optim.Optimizer, or a list of them")
    for each in optimizers:
        closure = inspect.signature(type(each).step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise Refusal(
                f"{where} returns {type(each).__name__}, which calls the loss more than once in a step; use one that "
                "needs only gradients"
            )
    taken = [id(p) for each in optimizers for group in each.param_groups for p in group["params"]]
    for name, parameter in given.items():
        if (count := taken.count(id(parameter))) != 1:
            fix = "freeze it in build (requires_grad_(False)), or give it to one" if count == 0 else "give it to one"
            raise Refusal(f"{where}: {name} is in {count or 'no'} groups of parameters; {fix}")
    if len(taken) > len(given):
        raise Refusal(f"{where}: {len(taken) - len(given)} of its parameters are not of those that it was given")
