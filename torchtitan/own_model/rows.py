"""Which dimension of each tensor in a batch counts its samples. Batches of unlike numbers of samples tell.

Only a pipeline cuts a batch, into microbatches. Everything else collates as many samples as it wants.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from torchtitan.own_model.record import OUTPUT, Way, leaves_of
from torchtitan.refusal import Refusal

Dims = tuple[int | None, ...]  # of each leaf of a batch; None: every sample shares it
_PIPELINE = "and a pipeline cuts it into microbatches"
_FIX = "use parallelism.pipeline_parallel_degree = 1"


def sample_dims(what: str, batches: Sequence[Any], counts: Sequence[int]) -> Dims:
    """Of each leaf of these batches, which hold so many samples. Refuses what they do not tell."""
    trees = [leaves_of(batch) for batch in batches]
    leaves = list(zip(*(each for each, _ in trees), strict=False))
    if any(spec != trees[0][1] for _, spec in trees):
        raise Refusal(
            f"{what} of {counts[0]} samples hold {len(trees[0][0])} values, and of {counts[1]} samples "
            f"{len(trees[1][0])}, {_PIPELINE}, which works for tensors with a dimension for the samples; let collate "
            f"stack them, or {_FIX}"
        )
    return tuple(_dim_of(what, seen, counts) for seen in leaves)


def _dim_of(what: str, seen: Sequence[Any], counts: Sequence[int]) -> int | None:
    if not isinstance(seen[0], Tensor):
        if all(are_same(leaf, seen[0]) for leaf in seen):
            return None
        raise Refusal(
            f"{what} hold {type(seen[0]).__name__}s that differ between batches, {_PIPELINE}, which works for tensors; "
            f"give tensors, or {_FIX}"
        )
    sizes = [list(leaf.shape) for leaf in seen]
    shortest = min(map(len, sizes))
    found = [dim for dim in range(shortest) if [size[dim] for size in sizes] == list(counts)]
    if len(found) == 1:
        return found[0]
    if not found and all(leaf.shape == seen[0].shape and leaf.equal(seen[0]) for leaf in seen):
        return None
    other = next((number for number, size in enumerate(sizes) if size != sizes[0]), 1)
    raise Refusal(
        f"{what} hold a tensor of size {sizes[0]} for {counts[0]} samples and {sizes[other]} for {counts[other]}, "
        f"{_PIPELINE}, which needs one dimension that counts the samples; let collate stack the samples, or {_FIX}"
    )


def are_same(one: Any, other: Any) -> bool:
    """Of what is no tensor; an array is never the same, because it compares by element."""
    return type(one) is type(other) and (one == other) is True


def dims_of_pairs(batches: Sequence[tuple[Any, Any]]) -> Dims:
    """Of the targets of batches of 2, 3, and then 2 samples each. torch's schedules cut inputs along the first."""
    counts, inputs = [2, 3, *[2] * (len(batches) - 2)], [each for each, _ in batches]
    dims = zip(sample_dims("inputs", inputs, counts), leaves_of(inputs[0])[0], strict=True)
    if wrong := [dim for dim, leaf in dims if isinstance(leaf, Tensor) and dim != 0]:
        said = "has no dimension for the samples" if wrong[0] is None else f"counts the samples in dimension {wrong[0]}"
        raise Refusal(
            f"an input {said}, and a pipeline cuts its inputs along the first; put the samples first (batch_first=True "
            f"in pad_sequence and in torch's layers), or {_FIX}"
        )
    return sample_dims("targets", [target for _, target in batches], counts)


def output_dims(way: Way) -> Dims:
    """Of each tensor that the model returns. Refuses an output whose samples cannot be taken apart."""
    found: list[int | None] = []
    for form in (form for value, form in sorted(way.forms.items()) if value.of == OUTPUT):
        of_samples = [dim for dim, size in enumerate(form.sizes) if (0, 0) in size.of]
        alone = [dim for dim in of_samples if form.sizes[dim].factor == 1 and form.sizes[dim].of == ((0, 0),)]
        if len(of_samples) != len(alone) or len(alone) > 1 or not form.sizes:
            raise Refusal(
                f"the model returns {form}, and a pipeline's validation leaves out the samples that only fill up the "
                "last batch, for which each output needs one dimension that counts the samples; return such outputs, "
                f"set validation.enable = false, or {_FIX}"
            )
        found.append(alone[0] if alone else None)
    return tuple(found)


def check_constants(inputs: Any, example: Any) -> None:
    """What is no tensor is in each stage's program as the first samples had it."""
    for leaf, known in zip(leaves_of(inputs)[0], leaves_of(example)[0], strict=False):
        if not isinstance(leaf, Tensor) and not are_same(leaf, known):
            raise Refusal(
                f"a batch's inputs hold {str(leaf)[:60]!r} where the first sample's hold {str(known)[:60]!r}, and a "
                f"pipeline passes on tensors alone; give it as a tensor, or {_FIX}"
            )


def check_rows(tree: Any, dims: Dims, count: int) -> None:
    """The first samples told the dimensions; each batch must agree."""
    for leaf, dim in zip(leaves_of(tree)[0], dims, strict=False):
        if isinstance(leaf, Tensor) and dim is not None and (leaf.dim() <= dim or leaf.shape[dim] != count):
            raise Refusal(
                f"a batch of {count} samples has a target of size {list(leaf.shape)}, in which dimension {dim} does "
                f"not count them as in the first samples, {_PIPELINE}; let collate stack the samples, or {_FIX}"
            )


def cut(tree: Any, dims: Dims, begin: int, size: int) -> Any:
    """So many samples of a batch, from the given one on."""
    leaves, spec = leaves_of(tree)
    pairs = zip(leaves, dims, strict=True)
    return pytree.tree_unflatten([leaf if dim is None else leaf.narrow(dim, begin, size) for leaf, dim in pairs], spec)
