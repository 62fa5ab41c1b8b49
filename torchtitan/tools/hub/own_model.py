"""Writes a trained model of one's own as safetensors, and as a program of torch.export."""

import inspect
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from torchtitan.checkpoint.storage import Manifest, find_checkpoints
from torchtitan.models.families import find_spec
from torchtitan.models.spec import ModelSpec
from torchtitan.own_model.derive import as_arguments, call_with, several_names
from torchtitan.own_model.forms import sizes_of
from torchtitan.own_model.samples import collate_of, open_dataset
from torchtitan.own_model.trials.first_samples import batches_of_many_sizes
from torchtitan.refusal import Refusal
from torchtitan.weights.adapted import merged
from torchtitan.weights.checkpoint import open_checkpoint
from torchtitan.weights.targets import refuse_existing


def export(checkpoint: str, target: str) -> None:
    from safetensors.torch import save_file

    storage, step = find_checkpoints(checkpoint)
    manifest = storage.examine(step if step >= 0 else max(storage.steps(), default=0))
    if not isinstance(manifest, Manifest):
        raise Refusal(f"{checkpoint} holds no checkpoint: {manifest}; name a run folder or a folder step-N")
    spec = find_spec(manifest.config["model"]["name"])
    if not isinstance(spec, ModelSpec):
        raise Refusal(f"{manifest.config['model']['name']} is a family of the recipe; use convert, for Hugging Face")
    refuse_existing(target)
    model = spec.build().eval()
    weights, adapter = open_checkpoint(storage, manifest.step), None
    if manifest.config.get("lora", {}).get("rank") is not None:
        from torchtitan.tools.hub import own_adapter

        adapter = own_adapter.find(weights, manifest, model)
        weights = merged(adapter)
    state, saved_names = model.state_dict(), saved_names_of(model)
    for name, tensor in state.items():
        weights.fill(saved_names.get(name, name), tensor)
    out = Path(target)
    out.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous().clone() for name, tensor in state.items()}, out / "model.safetensors")
    print(f"step {manifest.step}: {len(state)} tensors in {out / 'model.safetensors'}")
    dataset, _ = open_dataset(spec.data, "train")
    samples = list(islice(iter(dataset), 2))
    pairs = [*map(collate_of(spec), ([samples[0]], samples * 4)), *batches_of_many_sizes(dataset, samples, spec)]
    if adapter is not None:
        own_adapter.export(adapter, spec, model, pairs[0][0], str(out / "adapter"))
    _write_program(model, [inputs for inputs, _ in pairs], out / "model.pt2")


def saved_names_of(model: nn.Module) -> dict[str, str]:
    """A checkpoint holds a tensor with several names once, under the first."""
    groups = (
        several_names(model.named_parameters(remove_duplicate=False)),
        several_names(model.named_buffers(remove_duplicate=False)),
    )
    return {name: names[0] for group in groups for names in group for name in names}


def _write_program(model: nn.Module, batches: Sequence[Any], file: Path) -> None:
    """Record the model with free sizes where those of the batches differ, and say for which of them it was right."""
    batches = [tree_map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, b) for b in batches]
    sizes = [sizes_of(batch) for batch in batches]  # of clones, because a program of a view asks for views
    free = [
        [d for d in range(len(seen[0])) if len({size[d : d + 1] for size in seen}) > 1]
        for seen in zip(*sizes, strict=False)
    ]
    # torch keeps a size of 1 fixed, so the example is the batch whose smallest free size is the largest.
    smallest = [
        min((size[d] for size, dims in zip(each, free, strict=False) for d in dims), default=0) for each in sizes
    ]
    example = batches[smallest.index(max(smallest))]
    left = iter(free)
    dims = tree_map(
        lambda leaf: dict.fromkeys(next(left), torch.export.Dim.AUTO) if isinstance(leaf, torch.Tensor) else None,
        as_arguments(example),
    )
    args, kwargs = as_arguments(example)
    by_name = dict(zip(inspect.signature(model.forward).parameters, dims[0], strict=False)) | dims[1]
    try:
        program = torch.export.export(model, args, kwargs, dynamic_shapes=by_name)
    except Exception as error:
        print(f"torch.export cannot record this model ({str(error).partition(chr(10))[0]}), so there is no {file.name}")
        return
    torch.export.save(program, file)
    print(f"{_tried(model, torch.export.load(file).module(), batches)}: {file}")


@torch.no_grad()
def _tried(model: nn.Module, program: nn.Module, batches: Sequence[Any]) -> str:
    """For which of these batches the program gives what the model does."""
    right, wrong = dict[str, None](), dict[str, str]()
    for batch in batches:
        said = " with ".join(dict.fromkeys(str(list(size)) for size in sizes_of(batch)))
        try:
            pairs = zip(*(tree_leaves(call_with(each, batch)) for each in (program, model)), strict=True)
            fault = "" if all(map(_agree, *zip(*pairs, strict=True))) else "its outputs are not the model's"
        except Exception as error:
            fault = str(error).strip().partition("\n")[0]
        if fault:
            wrong[said] = fault
        else:
            right[said] = None
    if not wrong:
        return f"program, which gives the model's outputs for inputs of {', '.join(right)}"
    other, fault = next(iter(wrong.items()))
    return f"program for inputs of {', '.join(right) or 'no size'} only (with {other}: {fault})"


def _agree(ours: Any, theirs: Any) -> bool:
    return not isinstance(theirs, torch.Tensor) or torch.allclose(ours, theirs, rtol=1e-3, atol=1e-5, equal_nan=True)
