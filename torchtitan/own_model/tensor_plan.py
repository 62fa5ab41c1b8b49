"""The plan of tensor parallelism that a model of transformers brings, and whether a user's own is complete."""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel
from torch.distributed.tensor.parallel.style import ParallelStyle

from torchtitan.own_model.derive import call_with
from torchtitan.own_model.forms import sizes_of
from torchtitan.parallel.tensor import match_plan
from torchtitan.refusal import Refusal, place_of

_STYLES: Mapping[str, tuple[type[ParallelStyle], dict[str, Any]]] = {  # transformers' word for each of torch's styles
    "colwise": (ColwiseParallel, {}),
    "colwise_rep": (ColwiseParallel, {"output_layouts": Replicate()}),  # in transformers 4
    "colwise_gather_output": (ColwiseParallel, {"output_layouts": Replicate()}),
    "rowwise": (RowwiseParallel, {}),
    "replicated_with_grad_allreduce": (
        SequenceParallel,
        {"sequence_dim": 2, "use_local_output": True},
    ),  # a norm that sees this rank's heads
}


def words_of(model: nn.Module, shared: tuple[tuple[str, ...], ...], degree: int, name: str) -> dict[str, str]:
    """The style of each module, in transformers' words; refused if there is none, or one that torch has not."""
    config: Any = getattr(model, "config", None)
    prefix = getattr(model, "base_model_prefix", "")
    prefix = f"{prefix}." if prefix and hasattr(model, prefix) else ""
    words = {f"{prefix}{key}": word for key, word in (getattr(config, "base_model_tp_plan", None) or {}).items()}
    if not words:
        raise Refusal(
            f"parallelism.tensor_parallel_degree = {degree}, but {name} has no tensor_plan that says how ranks share "
            "its weights; use 1, or give its ModelSpec a plan for some of these modules: "
            f"{', '.join(_could_be_shared(model)) or 'none could be shared'}"
        )
    words |= {key: word for key, word in (getattr(type(model), "_tp_plan", None) or {}).items() if "." not in key}
    if foreign := sorted(set(words.values()) - set(_STYLES)):
        raise Refusal(
            f"parallelism.tensor_parallel_degree = {degree}: the plan in {name}'s configuration says "
            f"{', '.join(foreign)}, which are no styles of torch; use 1, or give its ModelSpec a tensor_plan"
        )
    for key in ("num_attention_heads", "num_key_value_heads"):
        if (heads := getattr(config, key, None) or degree) % degree:
            raise Refusal(f"parallelism.tensor_parallel_degree = {degree} does not divide {name}'s {key} = {heads}")
    several = {other.rpartition(".")[0] for names in shared for other in names}  # a tied weight stays whole
    return {key: word for key, word in words.items() if key not in several}


def styles_of(words: Mapping[str, str]) -> dict[str, ParallelStyle]:
    return {key: kind(**options) for key, word in words.items() for kind, options in [_STYLES[word]]}


@torch.no_grad()
def check_plan(model: nn.Module, plan: Mapping[str, ParallelStyle], degree: int, inputs: Any) -> None:
    """Run forward on the sizes that one rank will see; refuse a plan by which a module gets a part and wants all."""
    named = dict(model.named_modules())
    styles: Mapping[str, Any] = match_plan(plan, list(named))
    if any(type(s) not in (ColwiseParallel, RowwiseParallel) or not s.use_local_output for s in styles.values()):
        return  # what another style makes of its inputs is not known here
    was_training = model.training
    whole = sizes_of(call_with(model.eval(), inputs))
    running, split = [], [""]  # the names of modules: those that run, and the last that gave a part

    def enter(name: str, args: Any) -> Any:
        running.append(name)
        layout = styles[name].input_layouts[0] if name in styles else None
        if isinstance(layout, Shard) and args and isinstance(args[0], Tensor):
            return torch.cat([args[0]] * degree, layout.dim), *args[1:]
        return None

    def leave(name: str, output: Any) -> Any:
        running.pop()
        layout = styles[name].output_layouts[0] if name in styles else None
        if not isinstance(layout, Shard) or not isinstance(output, Tensor):
            return None
        split.append(name)
        return output.chunk(degree, layout.dim)[0]

    handles = []
    for name, module in named.items():
        handles.append(module.register_forward_pre_hook(lambda _, args, name=name: enter(name, args)))
        handles.append(module.register_forward_hook(lambda _, args, output, name=name: leave(name, output)))
    try:
        found, fault = sizes_of(call_with(model, inputs)), ""
    except Exception as error:
        found, fault = (), f"{place_of(error)} ({type(error).__name__}: {str(error).strip().partition(chr(10))[0]})"
    for handle in handles:
        handle.remove()
    model.train(was_training)
    if found == whole:
        return
    name, giver = running[-1] if running else "", split[-1]
    if name in styles and isinstance(styles[name].input_layouts[0], Shard):
        raise Refusal(
            f"by the tensor_plan, {name} takes a part of its inputs on each of {degree} ranks, but gets all of them"
            f"{fault}; give the module before it ColwiseParallel(), or {name} input_layouts=Replicate()"
        )
    also = f"{name} RowwiseParallel(), or " if isinstance(named[name], nn.Linear) and fault else ""
    what = f"{name or 'forward'} fails on them{fault}"
    if not fault:
        what = f"the model returns sizes {found} instead of {whole}"
    raise Refusal(
        f"the tensor_plan is incomplete: each of {degree} ranks has a part of the outputs of {giver}, and {what}; give "
        f"{also}{giver} ColwiseParallel(output_layouts=Replicate())"
    )


def _could_be_shared(model: nn.Module) -> list[str]:
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear | nn.Embedding)]
    return list(dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in names))
