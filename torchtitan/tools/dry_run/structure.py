"""Describe a module or an argument by everything that its work can depend on, as a key for look-ups.

Two blocks with equal structures do the same work. The reverse need not hold: a number that nothing reads, such as a
block's own index, makes two structures differ, which costs time and is never wrong.
"""

import enum
import functools
import types
from collections.abc import Hashable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

_PLAIN = (bool, int, float, complex, str, bytes, type, enum.Enum, torch.dtype, torch.device, types.NoneType)
_HOOKS = frozenset(name for name in vars(nn.Module()) if "hook" in name)
_BY_IDENTITY: Any = object.__hash__
_HOOKS_IN_A_STEP = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def block_structure(block: nn.Module) -> Hashable:
    """The structure of a block without its own hooks, which run around the block and not in it."""
    return _Reader().module(block, with_hooks=False)


def structure(value: Any) -> Hashable:
    """The structure of an argument."""
    return _Reader().read(value)


class _Reader:
    """Reads one value, and all that the value refers to, once."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[int, Any]] = {}  # by id: a number, and the object, so that the id stays its own
        self._in_object = False

    def read(self, value: Any) -> Hashable:
        if isinstance(value, _PLAIN):
            return type(value), value  # with its type, because 1 == True == 1.0
        if id(value) in self._seen:  # a cycle, or a weight that two modules share
            return "seen", self._seen[id(value)][0]
        self._seen[id(value)] = len(self._seen), value
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, nn.Module):
            return self.module(value)
        if isinstance(value, Mapping):
            return type(value), tuple((self.read(key), self.read(part)) for key, part in value.items())
        if isinstance(value, (list, tuple)):
            return type(value), tuple(map(self.read, value))
        if isinstance(value, (set, frozenset)):
            return type(value), frozenset(map(self.read, value))
        if isinstance(value, (functools.partial, types.FunctionType, types.MethodType)):
            return self._function(value)
        return self._object(value)

    def module(self, module: nn.Module, with_hooks: bool = True) -> Hashable:
        self._seen.setdefault(id(module), (len(self._seen), module))
        parts = {name: part for name, part in vars(module).items() if name not in _HOOKS}
        # Without the keys of hooks, which count all hooks of the process.
        hooks = [list(vars(module)[name].values()) for name in _HOOKS_IN_A_STEP] if with_hooks else []
        return type(module), self.read(parts), self.read(hooks)

    def _tensor(self, tensor: Tensor) -> Hashable:
        layout = (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else ()
        plain = tuple((name, part) for name, part in vars(tensor).items() if isinstance(part, _PLAIN))
        return type(tensor), tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad, layout, plain

    def _function(self, function: Any) -> Hashable:
        """The code, and the values that are bound to it."""
        if isinstance(function, functools.partial):
            return functools.partial, self.read([function.func, function.args, function.keywords])
        if isinstance(function, types.MethodType):
            return types.MethodType, self.read([function.__func__, function.__self__])
        cells = [_contents(cell) for cell in function.__closure__ or ()]
        return function.__code__, self.read([function.__defaults__, function.__kwdefaults__, cells])

    def _object(self, value: Any) -> Hashable:
        """The value itself if its class defines equality, else its attributes. Objects in those count by class only."""
        if is_dataclass(value):
            return type(value), self.read([getattr(value, field.name) for field in fields(value)])
        if isinstance(value, Hashable) and type(value).__hash__ is not _BY_IDENTITY:
            return value
        if self._in_object:
            return type(value), None
        if not hasattr(value, "__dict__"):
            return type(value), id(value)
        self._in_object = True
        attributes = self.read(vars(value))
        self._in_object = False
        return type(value), attributes


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a variable that has no value yet
        return None
