"""The part of a model that a rank holds: all of it, or some stages of a pipeline; its part of one tensor; its casts."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from torchtitan.parallel.loss_scale import LossScale
    from torchtitan.parallel.tied import TiedWeight

Places = list[tuple[dict[str, nn.Parameter], str]]


def tie(model: nn.Module, names: tuple[str, str] | None) -> bool:
    """Make both names one parameter again, if the module has both. Returns whether it has."""
    if names is None:
        return False
    owners = [_owner(model, name) for name in names]
    if None in owners:
        return False
    (first, first_leaf), (second, second_leaf) = owners  # type: ignore[misc]
    setattr(second, second_leaf, getattr(first, first_leaf))
    return True


def allocate(model: nn.Module, device: torch.device | str) -> None:
    """Give the parameters memory, without values. A tied weight stays one, of which `to_empty` makes two."""
    places = _places(model).values()
    model.to_empty(device=device)
    for (first, leaf), *others in places:
        for holder, name in others:
            holder[name] = first[leaf]


def _owner(model: nn.Module, name: str) -> tuple[nn.Module, str] | None:
    """The module that holds the parameter, if this stage has it, and the parameter's name in that module."""
    module, _, leaf = name.rpartition(".")
    try:
        return model.get_submodule(module), leaf
    except AttributeError:
        return None


class CastWeights:
    """Casts a model's weights before its forward, and their gradients back as soon as they are there.

    As under FSDP the casts stand where the parameters were: a backward that recomputes finds them. Each is freed with
    its gradient, or after forward where backward does not read it, and all that are left by `free`; while `keeps` is
    true, the next forward takes them. With `narrow` the first gradient stays as it came, if that loses nothing.
    """

    def __init__(
        self, model: nn.Module, dtype: torch.dtype, lookups: Iterable[nn.Module], narrow: bool = False
    ) -> None:
        found = {p: places for p, places in _places(model).items() if p.is_floating_point() and not stays_whole(p)}
        self._dtype, self._places, self._narrow = dtype, list(found.values()), narrow
        self.keeps = False
        self._own: dict[int, nn.Parameter] = {}  # parameters whose casts stand in the places of this number
        read_once = {id(module._parameters) for lookup in lookups for module in lookup.modules()}
        of_each = [{id(holder) for holder, _ in places} for places in self._places]  # two, where a weight is tied
        self._looked_up = [number for number, holders in enumerate(of_each) if holders <= read_once]
        self._freed: Tensor | None = None
        model.register_forward_pre_hook(lambda *_: self.cast())
        model.register_forward_hook(self._after_forward)

    def cast(self) -> None:
        for number, places in enumerate(self._places):
            parameter = next(holder[name] for holder, name in places)
            if number in self._own or parameter.dtype == self._dtype:
                continue
            cast = nn.Parameter(parameter.detach().to(self._dtype), parameter.requires_grad)
            if cast.requires_grad:
                cast.register_post_accumulate_grad_hook(partial(self._take, number, parameter))
            for holder, name in places:
                holder[name] = cast
            self._own[number] = parameter

    def free(self) -> None:
        for number in list(self._own):
            self._put_back(number)

    def _after_forward(self, *_: object) -> None:
        for number in self._looked_up if torch.is_grad_enabled() else ():
            self._put_back(number)

    @torch.no_grad()
    def _take(self, number: int, parameter: nn.Parameter, cast: Tensor) -> None:
        assert cast.grad is not None
        gradient, cast.grad = cast.grad, None
        if not self.keeps:
            self._put_back(number)
        is_narrow = gradient.itemsize < parameter.itemsize
        if parameter.grad is None:
            parameter.grad_dtype = None if self._narrow else parameter.dtype  # None: of any type
            parameter.grad = gradient if self._narrow and is_narrow else gradient.to(parameter.dtype)
        else:  # a wider one is rounded first, as for several ranks
            parameter.grad = parameter.grad.to(parameter.dtype)
            parameter.grad += gradient if is_narrow else gradient.to(parameter.dtype)
        for hook in (parameter._post_accumulate_grad_hooks or {}).values():  # as FSDP does
            hook(parameter)

    def _put_back(self, number: int) -> None:
        if (parameter := self._own.pop(number, None)) is None:
            return
        for holder, name in self._places[number]:
            cast, holder[name] = holder[name], parameter
        if self._freed is None:
            self._freed = cast.new_full((), torch.nan)
        cast.data = self._freed.expand(cast.shape)  # a graph may hold it longer, but no memory, and reads only this


def _places(model: nn.Module) -> dict[nn.Parameter, Places]:
    """Each parameter, and where it is; a tied weight is in two modules."""
    found: dict[nn.Parameter, Places] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                found.setdefault(parameter, []).append((module._parameters, name))  # type: ignore[arg-type]
    return found


def stays_whole(parameter: Tensor) -> bool:
    """Whether each rank keeps it as it is: a single number, such as a temperature, or what must not be rounded."""
    return parameter.dim() == 0 or getattr(parameter, "is_kept_whole", False)


@dataclass(frozen=True)
class ModelParts:
    """The stages that this rank holds, by number; without a pipeline, one stage is the whole model."""

    stages: Mapping[int, nn.Module]
    ranks: Sequence[int]  # the pipeline rank of every stage
    axis: DeviceMesh
    dim: int  # width of the activations between stages
    vocab_size: int  # width of the last stage's output
    ties: "Sequence[TiedWeight]" = ()
    loss_scale: "LossScale | None" = None  # with float16
    adapter: Any = None  # a lora.adapter.Adapter: then checkpoints hold no other weights
    reference: Any = None  # a preference.run.Reference: a frozen model beside it
    load: Any = None  # an experts.load.Load, where the model has experts
    casts: CastWeights | None = None  # on a rank that is alone

    def parameters(self) -> Iterator[nn.Parameter]:
        for stage in self.stages.values():
            yield from stage.parameters()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for stage in self.stages.values():
            yield from stage.named_parameters()

    def saved_parameters(self) -> dict[str, nn.Parameter]:
        """Parameters under the names of a checkpoint, where a tied weight and its copy are one entry."""
        named: dict[str, nn.Parameter] = {}
        first = {id(copy): tie.name for tie in self.ties for copy in tie.copies}
        for name, parameter in self.named_parameters():
            named.setdefault(first.get(id(parameter), name), parameter)
        return named

    def free_gathered(self) -> None:
        """Free what a forward has left, gathered or cast: it is not what is saved, and weights will change."""
        if self.casts is not None:
            self.casts.free()
        for stage in self.stages.values():
            for module in stage.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()

    @property
    def has_loss(self) -> bool:
        return len(self.ranks) - 1 in self.stages

    def own_gradients(self) -> list[Tensor]:
        """This rank's gradients; a tied weight counts on one stage only."""
        copies = {id(copy) for tie in self.ties for copy in tie.copies}
        own = [p.grad for p in self.parameters() if p.grad is not None and id(p) not in copies]
        if not own:  # the stage holds nothing else
            own = [torch.zeros_like(p.grad) for p in self.parameters() if p.grad is not None]
        return own or [torch.zeros(1, device=parameter.device) for parameter in islice(self.parameters(), 1)]  # frozen


@torch.no_grad()
def copy_part(tensor: Tensor, read: Callable[[tuple[slice, ...]], Tensor]) -> None:
    """Read this rank's part of a tensor, in the tensor's own type."""
    part = tuple(slice(0, size) for size in tensor.shape)
    if isinstance(tensor, DTensor):
        for chunk in tensor.__create_chunk_list__():  # DTensor's description of itself for checkpoints
            part = tuple(slice(o, o + size) for o, size in zip(chunk.offsets, chunk.sizes, strict=True))
        tensor = tensor.to_local()
    if tensor.numel():  # a rank beyond the last row holds nothing
        tensor.copy_(read(part))
