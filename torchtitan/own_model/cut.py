"""Cuts a user's module into pipeline stages, without a line of pipelines in it.

Each stage runs the module's own forward. In the place of a module that an earlier stage has, a stand-in gives what
arrived from there, or zeros where nothing that follows needs it; the first module of a later stage ends the forward.
What the code between the modules computes of the inputs alone, such as a mask, each stage computes for itself.
"""

import copy
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torchtitan.models.balance import balance
from torchtitan.models.own import Structure
from torchtitan.models.spec import Part
from torchtitan.own_model.derive import call_with
from torchtitan.own_model.forms import Sizes, sizes_of
from torchtitan.own_model.record import DRAWS, INPUTS, OUTPUT, Value, Way, as_values, kept, leaves_of, map_leaves
from torchtitan.refusal import Refusal


def divide(parts: Sequence[Part], way: Way, num_stages: int, counts: Sequence[int] | None = None) -> list[list[Part]]:
    """The parts of each stage, in the order of their calls: so many, or so that the slowest is as fast as possible."""
    by_name = {part.name: part for part in parts}
    called = [call.name for call in way.calls if call.name in by_name]
    if len(called) < num_stages:
        raise Refusal(
            f"parallelism makes {num_stages} pipeline stages, but the model calls only {len(called)} parts "
            f"with parameters ({', '.join(called)}); use fewer stages, or give the ModelSpec layers = the list's name"
        )
    if counts is None:
        sizes = [len(stage) for stage in balance([by_name[name] for name in called], num_stages) or []]
    elif sum(counts) != len(called) or len(counts) != num_stages or 0 in counts:
        raise Refusal(
            f"parallelism.pipeline_parallel_layer_counts = {list(counts)} does not divide the {len(called)} parts "
            f"{', '.join(called)} among {num_stages} stages; say how many of them each stage has, none of them 0"
        )
    else:
        sizes = list(counts)
    ends = itertools.accumulate(sizes, initial=0)
    return [[by_name[name] for name in called[begin:end]] for begin, end in itertools.pairwise(ends)]


class Cut:
    """One way of forward (training or validation), divided among stages."""

    def __init__(self, way: Way, stages: Sequence[Sequence[Part]], known: Mapping[str, int] | None = None) -> None:
        """`known`: the stages of modules in training. A module without parameters is where the one before it is."""
        self.way, self.last, place = way, len(stages) - 1, 0
        own = {part.name: number for number, stage in enumerate(stages) for part in stage}
        self.stage = {INPUTS: 0}
        for call in way.calls:
            found = self.last if call.name == OUTPUT else own.get(call.name, (known or {}).get(call.name, place))
            if found < place:
                raise Refusal(
                    f"in validation forward calls {call.name} later than in training, so the model cannot be cut into "
                    "pipeline stages before it; use parallelism.pipeline_parallel_degree = 1"
                )
            place = self.stage[call.name] = found
        for call in way.calls:
            for value in call.needs:
                if value.of == DRAWS and self.stage[way.calls[value.number].name] < self.stage[call.name]:
                    raise Refusal(
                        f"forward draws random numbers between its modules (dropout does), before "
                        f"{way.calls[value.number].name}, and uses them again after a cut, at {call.name}, where "
                        "others would be drawn; draw them in a module, such as nn.Dropout"
                    )
        # For each stage, and what follows the last.
        self.arriving = [self._find_arriving(stage) for stage in range(self.last + 2)]

    def _find_arriving(self, stage: int) -> list[Value]:
        """The values that come in from the stage before; for the first all inputs, after the last what is returned."""
        if stage > self.last:
            return [value for value in self.way.forms if value.of == OUTPUT]
        needs = {value for call in self.way.calls if self.stage[call.name] >= stage for value in call.needs}
        if stage == 0:
            return [value for value in self.way.forms if value.of == INPUTS]
        return [v for v in self.way.forms if v in needs and self.stage[v.of] < stage]

    def users(self, parameter: str) -> set[int]:
        """The stages whose calls read a parameter or buffer that is not theirs."""
        return {self.stage[call.name] for call in self.way.calls if Value(parameter) in call.needs}


def cut_ways(known: Structure, stages: Sequence[Sequence[Part]]) -> dict[bool, Cut]:
    training = Cut(known.ways[True], stages)
    return {True: training, False: Cut(known.ways[False], stages, training.stage)}


Tie = tuple[list[str], list[int]]  # the names of a weight, and the stages that have it under them


def place_weights(
    model: nn.Module, known: Structure, stages: Sequence[Sequence[Part]], cuts: Mapping[bool, Cut]
) -> tuple[list[list[str]], list[Tie]]:
    """What each stage does without of the weights and changing buffers that forward itself reads; and the ties."""
    in_stage: dict[int, int] = {}  # of each module, which may have several names
    called: dict[int, int] = {}  # of each tensor in them
    for number, stage in enumerate(stages):
        for part in stage:
            whole = model.get_submodule(part.name)
            in_stage |= {id(module): number for module in whole.modules()}
            called |= {id(tensor): number for tensor in (*whole.parameters(), *whole.buffers())}
    homes: dict[int, dict[int, str]] = {}  # of each tensor, the stages that have it, and its first name there
    away: list[list[str]] = [[] for _ in stages]
    every = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **{n: b for n, b in model.named_buffers(remove_duplicate=False) if n in known.changing},
    }
    for name, tensor in every.items():
        is_state = tensor.requires_grad or name in known.changing
        users = set().union(*(cut.users(name) for cut in cuts.values()))
        if (found := in_stage.get(id(model.get_submodule(name.rpartition(".")[0])))) is not None:
            own = {found}
        elif any(name.startswith(f"{each}.") for cut in cuts.values() for each in cut.stage):
            own = set(range(len(stages)))  # of a module without parameters
        else:
            own = users or {called.get(id(tensor), len(stages) - 1)}
            for number in set(range(len(stages))) - own:
                away[number].append(name)
        if name in known.changing and len(own) > 1 or is_state and not users <= own:
            raise Refusal(
                f"{name} is used on both sides of a cut, in stages {sorted(own | users)}, and not all of them can hold "
                "it; use it in one place, or use parallelism.pipeline_parallel_degree = 1"
            )
        for number in own if is_state else ():
            homes.setdefault(id(tensor), {}).setdefault(number, name)
    ties = []
    for names in (names for names in homes.values() if len(names) > 1):
        if changed := known.changing.intersection(names.values()):
            raise Refusal(
                f"stages {sorted(names)} share the buffer {min(changed)} as {' and '.join(names.values())}, and "
                "forward would change it in each apart; use parallelism.pipeline_parallel_degree = 1"
            )
        numbers = sorted(names)
        ties.append(([names[number] for number in numbers], numbers))
    return away, ties


@torch.no_grad()
def check_stages(model: nn.Module, known: Structure, stages: Sequence[Sequence[Part]], batches: Sequence[Any]) -> None:
    """Refuse a cut whose stages, one after another, do not compute what the whole model does."""
    inputs, others = batches[-1], batches[0]
    cuts = cut_ways(known, stages)
    away, _ = place_weights(model, known, stages, cuts)
    with kept(model):
        whole = call_with(model.eval(), inputs)
        call_with(model, others)  # so that what modules keep in secret is of another batch
    values = tuple(leaf for leaf in leaves_of(inputs)[0] if isinstance(leaf, Tensor))
    tensors = (*model.parameters(), *model.buffers())
    for number in range(len(stages)):
        own = copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})
        stage = Stage(own, cuts, number, inputs)
        stage.sizes = sizes_of(inputs)
        for name in away[number]:
            stage.take_away(name, next(model.parameters()).dtype)
        stage.listen()
        values = stage(*values)
    for ours, theirs in zip(values, (leaf for leaf in leaves_of(whole)[0] if isinstance(leaf, Tensor)), strict=True):
        pair = ours.double(), theirs.double()
        # Under autocast, torch's encoder layer rounds in another way when it is alone.
        rtol, atol = (3e-2, 1e-2) if torch.is_autocast_enabled("cpu") else (1e-3, 1e-5)
        if not torch.allclose(*pair, rtol=rtol, atol=atol, equal_nan=True):
            raise Refusal(
                f"cut into {len(stages)} pipeline stages, the model gives other numbers than whole (they differ by up "
                f"to {(pair[0] - pair[1]).abs().max():.2g}), because a module reads what another one leaves beside "
                "what it returns; return it, or use parallelism.pipeline_parallel_degree = 1"
            )


class _Reached(BaseException):
    """Forward has come to a module of a later stage."""


class _StandIn(nn.Module):
    """In the place of another stage's module. Whoever asks for its attributes is answered by the module it was."""

    def __init__(self, give: Callable[[], Any], was: nn.Module) -> None:
        super().__init__()
        self.__dict__ |= {"_give": give, "_was": was}

    def forward(self, *_: Any, **__: Any) -> Any:
        return self._give()

    def named_modules(self, *_: Any, **__: Any) -> Iterator[tuple[str, nn.Module]]:
        return iter(())  # it is no part of the stage

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_was"], name)


def _noted(call: Callable[..., Any], note: Callable[[Any], None]) -> Callable[..., Any]:
    def called(*args: Any, **kwargs: Any) -> Any:
        output = call(*args, **kwargs)
        note(output)
        return output

    return called


class Stage:
    """The forward of one stage: from the values that arrive to a tuple of those that leave."""

    def __init__(self, model: nn.Module, cuts: Mapping[bool, Cut], number: int, example: Any) -> None:
        self.model, self.cuts, self.number = model, cuts, number
        self.sizes: Sizes = ()  # of the inputs of the microbatch; OwnPipeline sets them
        self.forward = model.forward
        self.inputs = as_values(INPUTS, example)
        self.own: dict[str, nn.Module] = {}
        self.lacking: list[tuple[nn.Module, str, Tensor]] = []
        self.have: dict[Value, Tensor] = {}  # what arrived, and what this stage's modules gave
        model.forward = self
        modules = dict(model.named_modules(remove_duplicate=False))
        for name in {name for cut in cuts.values() for name in cut.stage if name in modules}:
            stages = {cut.stage[name] for cut in cuts.values() if name in cut.stage}
            if number in stages:
                self.own[name] = modules[name]
                continue
            stand_in = _StandIn(self._give(name), modules[name])
            for each in [each for each, module in modules.items() if module is modules[name]]:
                holder, _, leaf = each.rpartition(".")
                modules[holder]._modules[leaf] = stand_in

    def listen(self) -> None:
        """Keep what this stage's modules give, for those of later stages that need it; after they are compiled."""
        leaving = {value.of for cut in self.cuts.values() for value in cut.arriving[self.number + 1]}
        for name, module in self.own.items():
            if name not in leaving:
                continue
            note = self._note(name)
            if module._compiled_call_impl is None:
                module.register_forward_hook(lambda _, __, output, note=note: note(output))
            else:  # a hook would be compiled, too
                module._compiled_call_impl = _noted(module._compiled_call_impl, note)

    def take_away(self, name: str, dtype: torch.dtype) -> None:
        """A parameter or buffer of another stage that forward itself reads: a zero tensor stands for it."""
        holder, _, leaf = name.rpartition(".")
        module = self.model.get_submodule(holder)
        was = (module._parameters if leaf in module._parameters else module._buffers).pop(leaf)
        assert was is not None
        self.lacking.append((module, leaf, was.to(dtype) if was.is_floating_point() else was))

    def __call__(self, *values: Tensor) -> tuple[Tensor, ...]:
        cut, device = self.cuts[self.model.training], values[0].device
        for holder, leaf, was in self.lacking:
            holder.__dict__[leaf] = torch.zeros(was.shape, dtype=was.dtype, device=device)
        self.device, self.have = device, dict(zip(cut.arriving[self.number], values, strict=True))
        try:
            output = call_with(self.forward, map_leaves(self._tensor_of, self.inputs))
        except _Reached:
            leaving = cut.arriving[self.number + 1]
            if missing := [value.of for value in leaving if value not in self.have]:
                raise self._went_astray(f"it did not call {missing[0]}") from None
            for value in leaving:
                given, known = list(self.have[value].shape), list(cut.way.forms[value].shape(self.sizes))
                if given != known:
                    raise self._went_astray(f"{value.of} gave the size {given}, where {known} follows") from None
            return tuple(self.have[value].contiguous() for value in leaving)  # as they are sent
        finally:
            self.have = {}
        if self.number < cut.last:
            raise self._went_astray(f"it ended before stage {self.number + 1}")
        self.returned = as_values(OUTPUT, output)
        return tuple(leaf for leaf in leaves_of(output)[0] if isinstance(leaf, Tensor))

    def assembled(self, tensors: Sequence[Tensor]) -> Any:
        """The model's output, of the tensors that the last stage returned."""
        given = iter(tensors)
        return map_leaves(lambda leaf: next(given) if isinstance(leaf, Value) else leaf, self.returned)

    def _note(self, name: str) -> Callable[[Any], None]:
        def note(output: Any) -> None:
            cut = self.cuts[self.model.training]
            for number, leaf in enumerate(leaves_of(output)[0]):
                if (value := Value(name, number)) in cut.arriving[self.number + 1]:
                    self.have[value] = leaf.clone() if value in cut.way.written else leaf

        return note

    def _give(self, name: str) -> Callable[[], Any]:
        def give() -> Any:
            cut = self.cuts[self.model.training]
            if name not in cut.stage:
                raise self._went_astray(f"it called {name}")
            if cut.stage[name] > self.number:
                raise _Reached
            return map_leaves(self._tensor_of, cut.way.gives[name])

        return give

    def _tensor_of(self, leaf: Any) -> Any:
        """What arrived for a value, or zeros."""
        if not isinstance(leaf, Value):
            return leaf
        way = self.cuts[self.model.training].way
        if leaf not in self.have:
            return way.forms[leaf].zeros(self.sizes, self.device)
        return self.have[leaf].clone() if leaf in way.written else self.have[leaf]

    def _went_astray(self, how: str) -> Refusal:
        return Refusal(
            f"pipeline stage {self.number}: forward went another way than on the first samples: {how}; move what "
            "depends on values into a module, or use parallelism.pipeline_parallel_degree = 1"
        )
