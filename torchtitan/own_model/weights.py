"""Fills a user's module with weights that it, or another program, has saved under the module's names."""

import re
from collections.abc import Iterable, Mapping, Sequence, Set
from fnmatch import fnmatchcase

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchtitan.checkpoint.storage import find_checkpoints
from torchtitan.lora.names import is_adapter
from torchtitan.models.own import Structure
from torchtitan.observe.log import logger
from torchtitan.own_model.build import OwnParts
from torchtitan.refusal import Refusal
from torchtitan.weights.checkpoint import open_checkpoint
from torchtitan.weights.files import find_files, open_files
from torchtitan.weights.tensors import Weights

_OF_OLD_NORMS = re.compile(r"\.(gamma|beta)$")  # as models of 2018 name them, such as bert-base-uncased


def start_from(
    path: str, model: OwnParts, known: Structure, may_lack: Sequence[str], with_buffers: bool = True
) -> None:
    """Called by all ranks. Weights whose names match `may_lack` keep their first values where the file lacks them."""
    own = _of_base(model, with_buffers)
    source, error = None, None
    try:
        source = _open(path)
    except (Refusal, OSError) as fault:
        error = str(fault)
    parts: list[tuple[dict[str, torch.Size], str | None]] = [({}, None)] * dist.get_world_size()
    dist.all_gather_object(parts, ({name: t.shape for name, t in own.items()}, error))
    for error in (error for _, error in parts if error):
        raise Refusal(error)
    assert source is not None
    wanted = {name: shape for part, _ in parts for name, shape in part.items()}
    names = {other for name in wanted for other in known.names_of(name)}
    source = _fitted(source, names)
    found = _names_there(source, known, wanted)
    for old in _differences(source, found, wanted, may_lack):
        found.pop(old, None)
    for name, tensor in own.items():
        if name in found:
            source.fill(found[name], tensor)
    for tie in model.ties:
        tie.copy_first({})
    logger.info(f"loaded {len(found)} tensors of {source.where}")
    if kept := [name for name in wanted if name not in found]:
        logger.info(f"not there, so they keep their first values: {_some(kept)}")
    if unused := [name for name in source.outline if name not in names]:
        logger.info(f"not in the model, so left out: {_some(unused)}")


def _of_base(model: OwnParts, with_buffers: bool) -> dict[str, Tensor]:
    named = {name: tensor for name, tensor in model.named_tensors().items() if not is_adapter(name)}
    return {name: tensor for name, tensor in named.items() if with_buffers or isinstance(tensor, nn.Parameter)}


def _open(path: str) -> Weights:
    if files := find_files(path):
        return open_files(files)
    storage, step = find_checkpoints(path)
    return open_checkpoint(storage, step if step >= 0 else storage.steps()[0])


def open_for(path: str, model: nn.Module) -> Weights:
    """What lies at a path, under the names of a whole module, where it has them."""
    state = model.state_dict()
    source = _fitted(_open(path), state.keys())
    alike: dict[tuple[int, ...], list[str]] = {}  # the names of one tensor, of which the path may have another
    for name, tensor in state.items():
        alike.setdefault((tensor.data_ptr(), *tensor.shape, *tensor.stride()), []).append(name)
    there = {name: next((n for n in names if n in source.outline), None) for names in alike.values() for name in names}
    return source.renamed({name: other for name, other in there.items() if other is not None})


def _fitted(source: Weights, names: Set[str]) -> Weights:
    """With names that only what the model was saved in has changed, read as the model's; the log says how."""
    if not any(map(_OF_OLD_NORMS.search, names)):
        today = {".gamma": ".weight", ".beta": ".bias"}
        source = source.renamed({_OF_OLD_NORMS.sub(lambda old: today[old[0]], name): name for name in source.outline})
    missing = names - source.outline.keys()
    heads = {name.partition(".")[0] + "." for name in (*names, *source.outline) if "." in name}
    readings = {f'with "{head}"': {head + name: name for name in source.outline} for head in heads}
    readings |= {
        f'without "{head}"': {name.removeprefix(head): name for name in source.outline if name.startswith(head)}
        for head in heads
    }
    gains = {said: {new: old for new, old in pairs.items() if new in missing} for said, pairs in readings.items()}
    most = max(map(len, gains.values()), default=0)
    best = [said for said in gains if len(gains[said]) == most]
    if not most or len(best) > 1:  # the model may have several parts that the file could be for
        return source
    gained = gains[best[0]]
    logger.info(f"{source.where}: {most} names are read {best[0]} before them, as {next(iter(gained))}")
    return source.renamed({name: name for name in source.outline if name not in gained.values()} | gained)


def _names_there(source: Weights, known: Structure, wanted: Iterable[str]) -> dict[str, str]:
    """The name of each tensor in the file, which may have several for one."""
    found = {}
    for name in wanted:
        there = [other for other in known.names_of(name) if other in source.outline]
        for other in there[1:]:
            if not torch.equal(source.read(there[0]), source.read(other)):
                raise Refusal(
                    f"{source.where}: {there[0]} and {other} differ, and are one tensor in the model; untie them "
                    "there, or remove one from the file"
                )
        if there:
            found[name] = there[0]
    return found


def _differences(
    source: Weights, found: Mapping[str, str], wanted: Mapping[str, torch.Size], may_lack: Sequence[str]
) -> list[str]:
    """The names that keep their first values; a difference that was not allowed is refused."""
    for pattern in may_lack:
        if not any(fnmatchcase(name, pattern) for name in wanted):
            raise Refusal(
                f'checkpoint.initial_load_missing has "{pattern}", which no name of the model matches; its names are '
                f"{_some(list(wanted))}"
            )
    other = {name: source.outline[found[name]].shape for name in found}
    faults = {name: f"{name} is missing there" for name in wanted if name not in found}
    faults |= {
        name: f"{name} is {list(shape)} there, {list(wanted[name])} here"
        for name, shape in other.items()
        if shape != wanted[name]
    }
    allowed = [name for name in faults if any(fnmatchcase(name, pattern) for pattern in may_lack)]
    if refused := [said for name, said in faults.items() if name not in allowed]:
        unused = [name for name in source.outline if name not in found.values()]
        raise Refusal(
            f"{source.where} does not fit the model: {_some(refused, '; ')}"
            + (f"; and it has, but the model has not: {_some(unused)}" if unused else "")
            + "; for weights that may keep their first values, set checkpoint.initial_load_missing to their names, as "
            '["head.*"]'
        )
    return allowed


def _some(names: Sequence[str], between: str = ", ") -> str:
    return between.join(names[:20]) + (f"{between}and {len(names) - 20} more" if len(names) > 20 else "")
