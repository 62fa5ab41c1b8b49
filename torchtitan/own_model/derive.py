"""What a user's module does not say of itself: its parts by name and size, their cost, and what has two names."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from torchtitan.models.own import Structure
from torchtitan.models.spec import Part
from torchtitan.refusal import Refusal, blaming, place_of

LARGE = 1 << 20  # parameters of a module that is worth a collective of its own
_LISTS = nn.Sequential | nn.ModuleList | nn.ModuleDict
_ABOUT_INPUTS = (
    "a sample is (inputs, target), and inputs are a tensor, a tuple in the order of forward's arguments, or a dict by "
    "their names"
)


def as_arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A mapping is passed by name, a tuple or list by position, and anything else alone."""
    if isinstance(inputs, dict):
        return (), inputs
    return (tuple(inputs), {}) if isinstance(inputs, tuple | list) else ((inputs,), {})


def call_with(model: Callable[..., Any], inputs: Any) -> Any:
    args, kwargs = as_arguments(inputs)
    return model(*args, **kwargs)


def fix_for(values: Any, otherwise: str) -> str:
    """What to do about code that fails on these values of a sample."""
    if any(isinstance(leaf, Tensor) and leaf.dtype == torch.float64 for leaf in tree_leaves(values)):
        return (
            "the dataset gives float64, as numpy does, where torch's weights are float32; convert to float32 in the "
            'dataset, by .astype("float32") or .float()'
        )
    return otherwise


def build_module(build: Callable[[], Any]) -> nn.Module:
    if isinstance(build, nn.Module):
        raise Refusal(
            f"build of the ModelSpec is a {type(build).__name__}; give its class, or a function that builds it"
        )
    with blaming("build of the ModelSpec"):
        model = build()
    if not isinstance(model, nn.Module):
        raise Refusal(f"build of the ModelSpec returns {type(model).__name__}; return an nn.Module")
    if isinstance(model, torch.jit.ScriptModule) or hasattr(model, "_guards_fn"):
        raise Refusal(
            "build of the ModelSpec returns a compiled program (of TorchScript or torch.export), whose modules cannot "
            "be sharded or cut; build the model from its class, and load the program's weights into it: "
            "model.load_state_dict(torch.jit.load(file).state_dict())"
        )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise Refusal("no weight of the model requires a gradient, so there is nothing to train; unfreeze some")
    return model


def derive(model: nn.Module, layers: str | None, inputs: Any) -> Structure:
    """`inputs` are those of one sample, as a batch of one."""
    candidates = dict(candidates_of(model, layers))
    shared = tuple(several_names(model.named_parameters(remove_duplicate=False)))
    shared_buffers = tuple(several_names(model.named_buffers(remove_duplicate=False)))
    spread = [name for names in shared if len({part_of(name, candidates) for name in names}) > 1 for name in names]
    held = {part_of(name, candidates) for name in spread}
    costs, called = _flops_of_modules(model, inputs, candidates)
    parts: list[Part] = []
    rest: list[Part] = []
    for name in sorted(candidates, key=lambda name: called.index(name) if name in called else len(called)):
        size = sum(parameter.numel() for parameter in candidates[name].parameters())
        if not size:
            continue
        is_layer = layers is not None and name.rpartition(".")[0] == layers
        kind: Literal["layer", "other"] = "layer" if is_layer or size >= LARGE else "other"
        (rest if name in held else parts).append(Part(name, size, costs.get(name, 0), kind))
    inputs = tree_map(lambda v: v.to("meta") if isinstance(v, Tensor) else v, inputs)
    total = sum(parameter.numel() for parameter in model.parameters())
    trained = {name: parameter.shape for name, parameter in model.named_parameters() if parameter.requires_grad}
    return Structure(
        *(tuple(parts), tuple(rest), total, costs.get("", 0), inputs, shared, shared_buffers),
        trained=trained,
    )


def several_names(named: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, ...]]:
    """The names of each tensor that has more than one."""
    names: dict[int, list[str]] = {}
    for name, tensor in named:
        names.setdefault(id(tensor), []).append(name)
    yield from (tuple(each) for each in names.values() if len(each) > 1)


def part_of(name: str, parts: Sequence[str] | Mapping[str, Any]) -> str | None:
    """The part that holds this tensor."""
    return next((part for part in parts if name.startswith(f"{part}.")), None)


def candidates_of(model: nn.Module, layers: str | None, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The modules between which the model may be cut: its children, the entries of its lists, and each layer."""
    if layers is not None and not prefix:
        named = dict(model.named_modules())
        if not isinstance(named.get(layers), _LISTS):
            lists = [n for n, m in named.items() if isinstance(m, _LISTS) and n]
            raise Refusal(
                f"layers = {layers!r} in the ModelSpec is no list of modules; use one of "
                f"{', '.join(map(repr, lists)) or 'the names of an nn.ModuleList'}, or leave it out"
            )
    for name, child in model.named_children():
        whole = f"{prefix}{name}"
        is_layer = prefix == f"{layers}."
        if not is_layer and (isinstance(child, _LISTS) or (layers or "").startswith(f"{whole}.")):
            yield from candidates_of(child, layers, f"{whole}.")
        else:
            yield whole, child


def _flops_of_modules(
    model: nn.Module, inputs: Any, watched: Mapping[str, nn.Module]
) -> tuple[dict[str, int], list[str]]:
    """FLOPs of one sample by module, the whole model's under ""; and the watched modules in the order of calls.

    Forward runs and keeps nothing. Backward is counted by the weights and inputs of each product that have a gradient.
    """
    counter, was_training = FlopCounterMode(display=False, custom_mapping=_WITH_BACKWARD), model.training
    called: list[str] = []
    hooks = [m.register_forward_pre_hook(lambda *_, name=name: called.append(name)) for name, m in watched.items()]
    forget = torch.autograd.graph.saved_tensors_hooks(lambda saved: None, lambda nothing: nothing)
    try:
        with torch.enable_grad(), forget, counter:
            call_with(model.eval(), inputs)
    except Exception as error:
        raise Refusal(
            f"the model's forward fails on the first sample{place_of(error)}: {type(error).__name__}: "
            f"{error}; {fix_for(inputs, _ABOUT_INPUTS)}"
        ) from None
    finally:
        model.train(was_training)
        for hook in hooks:
            hook.remove()
    root = type(model).__name__
    counts = {name: sum(ops.values()) for name, ops in counter.get_flop_counts().items()}
    own = {name.removeprefix(f"{root}."): flops for name, flops in counts.items() if name.startswith(f"{root}.")}
    return {"": counts.get("Global", 0)} | own, called


def _with_backward(forward: Callable[..., int]) -> Callable[..., int]:
    """FLOPs of a product: as many again for each of its two factors that has a gradient."""

    def count(*args: Any, **kwargs: Any) -> int:
        trained = sum(isinstance(arg, Tensor) and arg.dim() > 1 and arg.requires_grad for arg in args)
        return forward(*args, **kwargs) * (1 + min(2, trained))

    count._get_raw = True  # type: ignore[attr-defined]  # as torch's formulas: called with tensors, not with shapes
    return count


def _lstm(x: Tensor, of_input: Tensor, of_state: Tensor, *_: Any, **__: Any) -> int:
    """One layer of an LSTM in one direction, which a CPU computes in a single operation; inputs are [T, B, I]."""
    of_each = of_input.numel() * (1 + x.requires_grad + of_input.requires_grad)
    return 2 * x.shape[0] * x.shape[1] * (of_each + of_state.numel() * (2 + of_state.requires_grad))


_lstm._get_raw = True  # type: ignore[attr-defined]
_WITH_BACKWARD: dict[Any, Any] = {operation: _with_backward(formula) for operation, formula in flop_registry.items()}
_WITH_BACKWARD[torch.ops.aten.mkldnn_rnn_layer] = _lstm
