"""Watches a user's module at work on real samples: which of its modules need what others gave.

A dispatch mode sees every operation on tensors. Each tensor that a module gives, or the data, is a value of its own;
what the code between modules makes of it depends on the same values. So nothing has to be traced, and whatever Python
stands between the modules (decorators, keyword arguments, loops, comparisons) runs as it is.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from torchtitan.own_model.derive import call_with
from torchtitan.own_model.forms import Form, Kind, form_of, sizes_of
from torchtitan.refusal import Refusal

INPUTS, OUTPUT, DRAWS = "the inputs", "the output", "random numbers"  # stand beside the names of modules
_READS = "_local_scalar_dense", "is_nonzero", "equal", "item"  # operations that give Python a number


@dataclass(frozen=True, order=True)
class Value:
    """A tensor that a module or the data gives, or a parameter that forward itself reads."""

    of: str  # the module's name, or INPUTS, or the parameter's
    number: int = 0  # of the leaf in what it gives


@dataclass(frozen=True)
class Call:
    name: str  # of the module, or OUTPUT
    needs: frozenset[Value]


@dataclass(frozen=True)
class Way:
    """How forward goes, in training or in validation."""

    calls: tuple[Call, ...]  # in order; the last is OUTPUT
    gives: Mapping[str, Any]  # of each module what it returns, with a Value for each tensor
    forms: Mapping[Value, Form]
    written: frozenset[Value]  # values that something else changes in place


_Seen = tuple[tuple[Call, ...], dict[str, Any], dict[Value, Kind], frozenset[Value]]


class _Again(Exception):
    """A module without parameters is called twice, so its output is no value of its own."""


class _Taints(TorchDispatchMode):
    """What each storage depends on. A view shares its tensor's storage, and so does what changes it in place."""

    def __init__(self, holders: Mapping[Value, set[str]]) -> None:
        super().__init__()
        self.of: dict[int, frozenset[Value]] = {}
        self.holders = holders  # of each parameter, and each buffer that forward changes: the units that have it
        self.values: dict[int, Value] = {}  # the storage of each value
        self.needs: set[Value] = set()  # of the call that is under way, or comes next
        self.num_calls, self.inside, self.is_plain = 0, "", False  # the unit at work, and whether it has no parameters
        self.written: set[Value] = set()
        self.read: set[Value] = set()  # values that decided where forward goes
        self.kept: list[Any] = []  # a storage that is freed would lend its number to another

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        used = {_storage(leaf) for leaf in pytree.arg_tree_leaves(*args, **(kwargs or {})) if isinstance(leaf, Tensor)}
        sources = frozenset[Value]().union(*(self.of.get(id, frozenset()) for id in used))
        written = self._written(func, args)
        self.written |= {self.values[id] for id in written if id in self.values}
        if self.inside and not self.is_plain:
            self.needs |= self.foreign(sources, self.inside)
            sources = frozenset([Value(_inside(self.inside))])
        else:
            self.foreign(sources, "")
            name = func._schema.name.partition("::")[2]
            if name in _READS:
                self.read |= sources
            if name.endswith("_like") or name.startswith("new_"):  # takes the size, and no numbers
                sources = frozenset()
            if torch.Tag.nondeterministic_seeded in func.tags:
                sources |= {Value(DRAWS, self.num_calls)}
            for id in written:
                self.of[id] = self.of.get(id, frozenset()) | sources
                if self.of[id] & self.holders.keys():  # a buffer, which changes where the call that comes next is
                    self.needs |= self.of[id]
        for leaf in pytree.tree_leaves(outputs):
            if isinstance(leaf, Tensor) and (id := _storage(leaf)) not in used:
                self.kept.append(leaf)
                self.of[id] = sources
        return outputs

    def foreign(self, sources: Iterable[Value], unit: str) -> set[Value]:
        """Those that the unit has not made itself. Refuses what is read of another module beside its output."""
        for value in sources:
            if value.of.startswith(_inside("")) and value.of != _inside(unit):
                raise Refusal(
                    f"{unit or 'forward'} reads a tensor from {value.of} which that module does not return, so a "
                    "pipeline would not carry it from stage to stage; return it, or use "
                    "parallelism.pipeline_parallel_degree = 1"
                )
        return {value for value in sources if value.of != _inside(unit) and unit not in self.holders.get(value, ())}

    @staticmethod
    def _written(func: Any, args: Sequence[Any]) -> set[int]:
        if not func._schema.is_mutable:
            return set()
        pairs = zip(args, func._schema.arguments, strict=False)
        changed = [arg for arg, said in pairs if said.alias_info and said.alias_info.is_write]
        return {_storage(leaf) for leaf in pytree.tree_leaves(changed) if isinstance(leaf, Tensor)}


def _inside(name: str) -> str:
    return f"inside {name}"


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def leaves_of(value: Any) -> tuple[list[Any], Any]:
    """The leaves of a tree, and how to put them together. A dataclass is a tree, too."""
    found: list[type] = []

    def is_new(node: Any) -> bool:
        kind = type(node)
        if not dataclasses.is_dataclass(kind) or kind is Value or kind in pytree.SUPPORTED_NODES:
            return False
        found.append(kind)
        return True

    leaves, spec = pytree.tree_flatten(value, is_leaf=is_new)
    for kind in set(found):
        pytree.register_dataclass(kind)
    return leaves_of(value) if found else (leaves, spec)


def map_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    leaves, spec = leaves_of(tree)
    return pytree.tree_unflatten([function(leaf) for leaf in leaves], spec)


def as_values(of: str, tree: Any) -> Any:
    """The tree with a Value for each tensor, and without what is no plain Python."""
    plain = bool, int, float, str, bytes, type(None), torch.dtype, torch.device
    leaves, spec = leaves_of(tree)
    values = [
        Value(of, n) if isinstance(leaf, Tensor) else leaf if isinstance(leaf, plain) else None
        for n, leaf in enumerate(leaves)
    ]
    try:
        return pytree.tree_unflatten(values, spec)
    except Exception:  # of torch's PackedSequence, which looks at its tensors
        raise Refusal(
            f"{of} gives a structure that cannot be made without its tensors (such as a PackedSequence), so a pipeline "
            "cannot pass it on; pack and unpack inside one module, or use parallelism.pipeline_parallel_degree = 1"
        ) from None


def record(
    model: nn.Module, units: Mapping[str, nn.Module], batches: Sequence[Any], changing: frozenset[str]
) -> dict[bool, Way]:
    """How forward goes in training and in validation, on batches of unlike sizes.

    `units` are the modules between which the model may be cut; a module without parameters that depends on inputs
    alone is left to each stage. `changing` are the buffers that forward changes.
    """
    ways, sizes = {}, [sizes_of(batch) for batch in batches]
    for training in (True, False):
        first, *others = seen = [_watched(model.train(training), units, batch, changing) for batch in batches]
        for other in others:
            _check_same(first, other)
        forms = {value: form_of(value.of, [each[2][value] for each in seen], sizes) for value in first[2]}
        ways[training] = Way(first[0], first[1], forms, first[3])
    return ways


def _check_same(first: _Seen, other: _Seen) -> None:
    """Only sizes of tensors may differ between batches."""
    ways = [[call.name for call in way[0]] for way in (first, other)]
    names = [a or b for a, b in itertools.zip_longest(*ways) if a != b]
    names += [name for name in first[1] if leaves_of(first[1][name]) != leaves_of(other[1].get(name))]
    if names or first[0] != other[0]:
        raise Refusal(
            "the model's forward goes another way, or returns another number beside tensors, for a batch of another "
            f"size, from {names[0] if names else OUTPUT} on, so it cannot be cut into pipeline stages; use "
            "parallelism.pipeline_parallel_degree = 1"
        )


def _watched(model: nn.Module, units: Mapping[str, nn.Module], inputs: Any, changing: frozenset[str]) -> _Seen:
    units = dict(units)
    while True:
        try:
            return _Watched(model, units, changing).run(inputs)
        except _Again as again:
            del units[str(again)]


class _Watched:
    """One forward."""

    def __init__(self, model: nn.Module, units: Mapping[str, nn.Module], changing: frozenset[str]) -> None:
        self.model, self.units = model, units
        named = *model.named_parameters(), *((n, b) for n, b in model.named_buffers() if n in changing)
        ids = {id(tensor): Value(name) for name, tensor in named}
        holders: dict[Value, set[str]] = {value: set() for value in ids.values()}
        for name, unit in units.items():
            for tensor in (*unit.parameters(), *unit.buffers()):
                if id(tensor) in ids:
                    holders[ids[id(tensor)]].add(name)
        self.taints = _Taints(holders)
        self.taints.of |= {_storage(tensor): frozenset([ids[id(tensor)]]) for _, tensor in named}
        self.calls: list[Call] = []
        self.gives: dict[str, Any] = {}
        self.values: dict[Value, Kind] = {}

    def run(self, inputs: Any) -> _Seen:
        self._name(INPUTS, inputs)
        hooks = [unit.register_forward_pre_hook(self._enter(name)) for name, unit in self.units.items()]
        hooks += [unit.register_forward_hook(self._leave(name)) for name, unit in self.units.items()]
        try:
            with kept(self.model), torch.set_grad_enabled(self.model.training), self.taints:
                output = call_with(self.model, inputs)
        finally:
            for handle in hooks:
                handle.remove()
        self._close(OUTPUT, output)
        self._name(OUTPUT, output)
        read = self.taints.read
        if decided := {value for value in read if value.of not in (INPUTS, DRAWS) and value not in self.taints.holders}:
            raise Refusal(
                f"forward looks at numbers that come from {min(decided).of} to decide what it does between its "
                "modules, so it cannot be cut into pipeline stages; move the decision into a module, or use "
                "parallelism.pipeline_parallel_degree = 1"
            )
        if read:  # another batch may take another way, so every stage gets all inputs
            whole = frozenset(value for value in self.values if value.of == INPUTS)
            self.calls = [Call(call.name, call.needs | whole) for call in self.calls]
        return tuple(self.calls), self.gives, self.values, frozenset(self.taints.written)

    def _enter(self, name: str) -> Callable[..., None]:
        is_plain = not any(name in holders for holders in self.taints.holders.values())

        def hook(*_: Any) -> None:
            if self.taints.inside:
                return
            if name in self.gives and is_plain:
                raise _Again(name)
            if name in self.gives:
                raise Refusal(
                    f"the model calls {name} more than once, so it cannot be cut into pipeline stages around it; use "
                    "parallelism.pipeline_parallel_degree = 1"
                )
            self.taints.inside, self.taints.is_plain = name, is_plain

        return hook

    def _leave(self, name: str) -> Callable[..., None]:
        def hook(_: nn.Module, __: Any, output: Any) -> None:
            if self.taints.inside != name:
                return
            self.taints.inside = ""
            if self.taints.is_plain and all(value.of == INPUTS for value in self._sources(name, output)):
                self.gives[name] = None  # each stage runs it
                return
            self._close(name, output)
            self.gives[name] = self._name(name, output)

        return hook

    def _sources(self, name: str, tree: Any) -> set[Value]:
        tensors = [leaf for leaf in leaves_of(tree)[0] if isinstance(leaf, Tensor)]
        given = {value for tensor in tensors for value in self.taints.of.get(_storage(tensor), ())}
        return self.taints.foreign(given, name)

    def _close(self, name: str, tree: Any) -> None:
        """Note a call. It needs what it has read, and what it returns without having made it."""
        self.calls.append(Call(name, frozenset(self.taints.needs | self._sources(name, tree))))
        self.taints.needs, self.taints.num_calls = set(), len(self.calls)

    def _name(self, of: str, tree: Any) -> Any:
        """The tree as values, which its storages are from here on."""
        for number, leaf in enumerate(leaves_of(tree)[0]):
            if isinstance(leaf, Tensor):
                value, id = Value(of, number), _storage(leaf)
                self.values[value] = leaf.shape, leaf.dtype, leaf.requires_grad
                self.taints.of[id], self.taints.values[id] = frozenset([value]), value
                self.taints.kept.append(leaf)
        return as_values(of, tree)


@contextmanager
def kept(model: nn.Module) -> Iterator[None]:
    """Buffers end as they began."""
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    try:
        yield
    finally:
        for name, buffer in model.named_buffers():
            if name in before and before[name].shape == buffer.shape:
                buffer.data.copy_(before[name])
