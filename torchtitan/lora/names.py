"""Which layers get an adapter, and which weights are trained, by patterns of names; no torch."""

import re
from collections.abc import Iterable, Sequence, Set
from fnmatch import fnmatchcase

from torchtitan.refusal import Refusal

_PARTS = (".lora_A", ".lora_B")


def is_adapter(name: str) -> bool:
    """Whether a parameter is an adapter's."""
    return name.endswith(_PARTS)


def layer_of(name: str) -> str:
    """`layers.0.attention.wq.lora_A` -> `layers.0.attention.wq`."""
    return name.rpartition(".")[0]


def find_targets(patterns: Sequence[str], linear: Set[str], modules: Set[str], layers: Iterable[str]) -> list[str]:
    """The linear layers that get an adapter; without patterns all that lie in blocks, or all where none is known."""
    if not patterns:
        blocks = tuple(f"{layer}." for layer in layers)
        chosen = {name for name in linear if not blocks or name.startswith(blocks)}
        if not chosen:
            raise Refusal(f"lora.rank: the blocks have no linear layer; name lora.targets, of {_some(linear)}")
        return sorted(chosen)
    found: set[str] = set()
    for pattern in patterns:
        here = {name for name in linear if _matches(name, pattern) or fnmatchcase(name, f"*.{pattern}")}
        if not here:
            other = [name for name in modules if fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")]
            why = (
                f"which is no linear layer (nn.Linear), nor holds one: {_some(other)}"
                if other
                else "which matches nothing"
            )
            raise Refusal(f'lora.targets has "{pattern}", {why}; the linear layers are {_some(linear)}')
        found |= here
    return sorted(found)


def find_trained(patterns: Sequence[str], names: Iterable[str]) -> set[str]:
    """The weights that are trained."""
    names, found = list(names), set[str]()
    for pattern in patterns:
        here = {name for name in names if _matches(name, pattern)}
        if not here:
            raise Refusal(
                f'training.train_only has "{pattern}", which matches no weight of the model, and no module; its '
                f"weights are {_some(names)}"
            )
        found |= here
    return found


def _matches(name: str, pattern: str) -> bool:
    """Whether the pattern is this name, or one of a module that holds it."""
    parts = name.split(".")
    return any(fnmatchcase(".".join(parts[:end]), pattern) for end in range(1, len(parts) + 1))


def _some(names: Iterable[str]) -> str:
    """Each once, and the same of all blocks once."""
    kinds = list(dict.fromkeys(re.sub(r"\.\d+(?=\.|$)", ".*", name) for name in sorted(names)))
    return ", ".join(kinds[:20]) + (f" and {len(kinds) - 20} more" if len(kinds) > 20 else "") or "none"
