"""Count the bytes of all live tensors, by their purpose, and the bytes that each kind of collective moves.

The tensors are fake, so nothing is allocated. The count leaves out what a kernel allocates for itself.
"""

import weakref
from collections import Counter
from collections.abc import Iterable
from itertools import accumulate, count
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type
from torch.utils._pytree import tree_leaves

KINDS = ("parameters", "gradients", "optimizer", "activations")  # "activations" is everything else
COLLECTIVES = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "send", "recv")

# The operations with which FSDP2 gathers parameters and scatters gradients; tensor parallelism uses other ones.
_FSDP = {
    "fsdp::all_gather_copy_in": "parameters",
    "fsdp::split_with_sizes_copy": "parameters",
    "fsdp::chunk_cat": "gradients",
    "c10d::_reduce_scatter_base_": "gradients",
}
Event = tuple[int, int]  # the number of a storage, and by how many bytes it grew


class Footprint(TorchDispatchMode):
    """Records every storage that appears, changes its size or is freed, and the bytes of every collective."""

    def __init__(self, fake: FakeTensorMode) -> None:
        """Count the tensors of the mode `fake`."""
        super().__init__()
        self._fake = fake
        self.events: list[Event] = []
        self.moved: Counter[str] = Counter()
        self.is_routed = False  # what appears now grows with the load of this rank's experts
        self._routed: set[int] = set()
        self._kinds: dict[int, str] = {}
        self._live: dict[int, tuple[int, weakref.ref]] = {}  # by id: its number, and a reference that reports its end
        self._sizes: dict[int, int] = {}
        self._numbers = count()

    def __enter__(self) -> "Footprint":
        resize = torch.UntypedStorage.resize_

        def resize_and_note(storage: torch.UntypedStorage, size: int) -> Any:  # so FSDP frees gathered weights
            resized = resize(storage, size)
            if id(storage) in self._live:
                self._set_size(self._live[id(storage)][0], storage.nbytes())
            return resized

        self._restore = resize
        torch.UntypedStorage.resize_ = resize_and_note  # type: ignore[method-assign, assignment]
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self._restore  # type: ignore[method-assign]
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(is_traceable_wrapper_subclass_type(kind) for kind in types):
            return NotImplemented  # a DTensor's operation returns here for its local tensors
        result = func(*args, **(kwargs or {}))
        if len(self._fake.enter_stack) > 1:  # DTensor infers a shape here, with fake tensors of the whole size
            return result
        for tensor in tensors_in(result):
            self.number(tensor)
        namespace, _, name = func.name().partition("::")
        if name == "cat.out":  # FSDP gathers so what it does not shard by rows, as experts may be
            self.mark(tensors_in(kwargs), "parameters")
        if namespace in ("c10d", "_c10d_functional", "fsdp"):
            tensors = tensors_in([args, kwargs, result])
            kind = _FSDP.get(f"{namespace}::{name.partition('.')[0]}")
            if kind is not None:
                self.mark(tensors, kind)
            plain = name.replace("_", "")  # torch spells a collective's name in several ways
            collective = next((c for c in COLLECTIVES if plain.startswith(c.replace("-", ""))), None)
            if namespace != "fsdp" and collective and tensors:
                self.moved[collective] += max(tensor.nbytes for tensor in tensors)
        return result

    def mark(self, tensors: Iterable[Tensor], kind: str) -> None:
        """Set the kind of these tensors. The first call for a storage decides."""
        for tensor in tensors:
            self._kinds.setdefault(self.number(tensor), kind)

    def end_of(self, tensor: Tensor) -> Event:
        """The event that will follow when the tensor is freed."""
        number = self.number(tensor)
        return number, -self._sizes[number]

    def number(self, tensor: Tensor) -> int:
        """The number of the tensor's storage in events."""
        storage = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).untyped_storage()
        known = self._live.get(id(storage))
        if known is not None:
            return known[0]
        number, address = next(self._numbers), id(storage)
        if self.is_routed:
            self._routed.add(number)

        def gone(_: Any) -> None:
            del self._live[address]
            self._set_size(number, 0)

        self._live[address] = number, weakref.ref(storage, gone)
        self._set_size(number, 0 if tensor.device.type == "meta" else storage.nbytes())
        return number

    def _set_size(self, number: int, size: int) -> None:
        before = self._sizes.get(number, 0)
        if size != before:
            self._sizes[number] = size
            self.events.append((number, size - before))

    def peak(self) -> dict[str, int]:
        """Live bytes of each kind, at the moment when their sum is largest."""
        totals = list(accumulate(change for _, change in self.events))
        at_peak = dict.fromkeys(KINDS, 0)
        for number, change in self.events[: totals.index(max(totals)) + 1]:
            at_peak[self._kinds.get(number, "activations")] += change
        return at_peak

    def peak_at_twice_the_load(self) -> int:
        """Live bytes at the fullest moment of a rank whose experts have twice as much to do."""
        routed = self._routed - self._kinds.keys()
        return max(accumulate(change * (1 + (number in routed)) for number, change in self.events))


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in a value, also in nested lists, tuples and dictionaries."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
