"""What a user's module does not say of itself: its parts by name and size, their cost, and shared weights."""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import FlopCounterMode

from torchtitan.models.spec import Part
from torchtitan.refusal import Refusal

LARGE = 1 << 20  # parameters of a module that is worth a collective of its own


@dataclass(frozen=True)
class Inputs:
    """The arguments of forward that the data gives, in the order of forward's signature."""

    names: tuple[str, ...]


@dataclass(frozen=True)
class Structure:
    """What is derived from a module and one sample. Rank 0 derives it, and tells the others."""

    parts: tuple[Part, ...]
    num_parameters: int
    flops: int  # of forward and backward of one sample
    inputs: Inputs
    example: Any  # the inputs of a batch of one, on the meta device
    target: Any  # likewise
    shared: tuple[tuple[str, ...], ...]  # names of one parameter


def as_arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A mapping is passed by name, a tuple or list by position, and anything else alone."""
    if isinstance(inputs, dict):
        return (), inputs
    return (tuple(inputs), {}) if isinstance(inputs, tuple | list) else ((inputs,), {})


def in_order(inputs: Any, names: Sequence[str]) -> list[Any]:
    """The inputs as forward's arguments, all by position."""
    args, kwargs = as_arguments(inputs)
    return [*args, *(kwargs[name] for name in names[len(args) :])]


def derive(model: nn.Module, layers: str | None, inputs: Any, target: Any = None) -> Structure:
    """`inputs` and `target` are those of one sample, as a batch of one."""
    args, kwargs = as_arguments(inputs)
    shared = tuple(shared_parameters(model))
    held = {name.rpartition(".")[0] for names in shared for name in names}
    candidates = dict(_candidates(model, layers))
    costs, called = _flops_of_modules(model, args, kwargs, candidates)
    parts = []
    for name in sorted(candidates, key=lambda name: called.index(name) if name in called else len(called)):
        module = candidates[name]
        size = sum(parameter.numel() for parameter in module.parameters())
        if size and not any(owner == name or owner.startswith(f"{name}.") for owner in held):
            is_layer = layers is not None and name.rpartition(".")[0] == layers
            kind: Literal["layer", "other"] = "layer" if is_layer or size >= LARGE else "other"
            parts.append(Part(name, size, 3 * costs.get(name, 0), kind))
    arguments = tuple(inspect.signature(model.forward).parameters)
    names = (*arguments[: len(args)], *(name for name in arguments[len(args) :] if name in kwargs))
    inputs, target = tree_map(lambda v: v.to("meta") if isinstance(v, torch.Tensor) else v, (inputs, target))
    total = sum(parameter.numel() for parameter in model.parameters())
    return Structure(tuple(parts), total, 3 * costs.get("", 0), Inputs(names), inputs, target, shared)


def shared_parameters(model: nn.Module) -> Iterator[tuple[str, ...]]:
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    yield from (tuple(each) for each in names.values() if len(each) > 1)


def _candidates(model: nn.Module, layers: str | None, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The modules between which the model may be cut: its children, and the entries of its lists."""
    if layers is not None and not prefix:
        named = dict(model.named_modules())
        if not isinstance(named.get(layers), nn.Sequential | nn.ModuleList | nn.ModuleDict):
            lists = [n for n, m in named.items() if isinstance(m, nn.Sequential | nn.ModuleList | nn.ModuleDict)]
            raise Refusal(
                f"layers = {layers!r} in the ModelSpec is no list of modules; use one of "
                f"{', '.join(map(repr, lists)) or 'the names of an nn.ModuleList'}, or leave it out"
            )
    for name, child in model.named_children():
        whole = f"{prefix}{name}"
        if isinstance(child, nn.Sequential | nn.ModuleList | nn.ModuleDict) or (layers or "").startswith(f"{whole}."):
            yield from _candidates(child, layers, f"{whole}.")
        else:
            yield whole, child


def _flops_of_modules(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], watched: Mapping[str, nn.Module]
) -> tuple[dict[str, int], list[str]]:
    """FLOPs of forward for one sample, the whole model's under ""; and the watched modules in the order of calls."""
    counter, was_training = FlopCounterMode(display=False), model.training
    called: list[str] = []
    hooks = [m.register_forward_pre_hook(lambda *_, name=name: called.append(name)) for name, m in watched.items()]
    try:
        with torch.no_grad(), counter:
            model.eval()(*args, **kwargs)
    except Exception as error:
        raise Refusal(
            f"the model's forward fails on the first sample: {type(error).__name__}: {error}; a sample is (inputs, "
            "target), and inputs are a tensor, a tuple in the order of forward's arguments, or a dict by their names"
        ) from error
    finally:
        model.train(was_training)
        for hook in hooks:
            hook.remove()
    root = type(model).__name__
    counts = {name: sum(ops.values()) for name, ops in counter.get_flop_counts().items()}
    own = {name.removeprefix(f"{root}."): flops for name, flops in counts.items() if name.startswith(f"{root}.")}
    return {"": counts.get("Global", 0)} | own, called
