"""Linear layers with an adapter: weight + scaling * B A, of which only A and B are trained.

Parameters keep their names, and the adapter's are beside them: `wq.weight`, `wq.lora_A`, `wq.lora_B`.
"""

import math
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from torchtitan.config.schema import Config, Lora
from torchtitan.lora.names import find_targets, find_trained, is_adapter
from torchtitan.refusal import Refusal


class LoraLinear(nn.Linear):
    """A linear layer that became one with an adapter, so that it is the same object with the same hooks."""

    lora_A: nn.Parameter  # [rank, in]
    lora_B: nn.Parameter  # [out, rank]
    scaling: float
    dropout: float

    def forward(self, x: Tensor) -> Tensor:
        out = F.linear(x, self.weight, self.bias)
        if isinstance(self.weight, DTensor):
            return self._of_shards(x, out)
        return out + F.linear(F.linear(self._dropped(x), self.lora_A) * self.scaling, self.lora_B)

    def _dropped(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout) if self._drops() else x

    def _drops(self) -> bool:
        # Validation and samples run the training's model without gradients.
        return bool(self.dropout) and self.training and torch.is_grad_enabled()

    def _of_shards(self, x: Tensor, out: Tensor) -> Tensor:
        """The same on tensor-parallel ranks, of plain tensors, so that no activation travels for the adapter.

        A rank with some outputs has all of A and its rows of B, one with some inputs its columns of A and all of B.
        What it has whole gets a part of its gradient on each rank, and so does an input that all ranks have.
        """
        assert isinstance(x, DTensor) and isinstance(out, DTensor)
        of_input = [Partial()] if out.placements[0].is_shard() else x.placements
        own = self._dropped_part(x.to_local(grad_placements=of_input), x)
        hidden = F.linear(own, _local(self.lora_A)) * self.scaling
        delta = F.linear(hidden, _local(self.lora_B))
        return out + DTensor.from_local(delta, out.device_mesh, out.placements, run_check=False)

    def _dropped_part(self, own: Tensor, x: DTensor) -> Tensor:
        """Each rank draws for the whole input, so that its part is what one process would drop there."""
        if own.shape == x.shape or not self._drops():
            return self._dropped(own)
        (placement,) = x.placements
        assert isinstance(placement, Shard)
        factors = self._dropped(own.new_ones(x.shape))
        return own * factors.chunk(x.device_mesh.size(), placement.dim)[x.device_mesh.get_local_rank()]

    def split_adapter(self) -> None:
        """Share the adapter over tensor-parallel ranks as the layer is: of A and B, one is split and one is whole.

        All is on the meta device, and the layer is split.
        """
        if not isinstance(self.weight, DTensor):
            return
        mesh, placement = self.weight.device_mesh, self.weight.placements[0]
        by_outputs = placement.is_shard(0)
        places = {
            "lora_A": Replicate() if by_outputs else placement,
            "lora_B": placement if by_outputs else Replicate(),
        }
        for name, place in places.items():
            like = getattr(self, name)
            part = distribute_tensor(torch.empty(like.shape, dtype=like.dtype, device="meta"), mesh, [place])
            setattr(self, name, nn.Parameter(part))


def _local(parameter: Tensor) -> Tensor:
    """This rank's part; the gradients of what all ranks have are summed over them."""
    assert isinstance(parameter, DTensor)
    if parameter.placements[0].is_shard():
        return parameter.to_local()
    # A redistribution to what it is already: forward does nothing, backward sums.
    return parameter.redistribute(placements=parameter.placements).to_local(grad_placements=[Partial()])


def attach(model: nn.Module, config: Config, layers: Iterable[str]) -> None:
    """Give a whole model its adapters, or freeze all but some weights. `layers` are the names of its blocks.

    New values are A's of kaiming_uniform, as peft has it, and zeros of B: the adapter begins as nothing.
    """
    if config.lora.rank is not None:
        linear = {n for n, m in model.named_modules(remove_duplicate=False) if type(m) is nn.Linear}
        chosen = find_targets(config.lora.targets, linear, {n for n, _ in model.named_modules()}, layers)
        shared = _shared(model)
        for name in chosen:
            if f"{name}.weight" in shared:
                raise Refusal(
                    f"lora.targets names {name}, whose weight another module has, too: with an adapter merged into it, "
                    f"they would differ; leave {name} out"
                )
            _adapt(model.get_submodule(name), config.lora, getattr(torch, config.training.dtype))
        # Read by the fast path of torch's own encoder, which takes weights past their modules.
        torch.backends.mha.set_fastpath_enabled(False)
    freeze(model, config)


def _shared(model: nn.Module) -> set[str]:
    named = list(model.named_parameters(remove_duplicate=False))
    count: dict[int, int] = {}
    for _, parameter in named:
        count[id(parameter)] = count.get(id(parameter), 0) + 1
    return {name for name, parameter in named if count[id(parameter)] > 1}


def _adapt(linear: nn.Module, lora: Lora, dtype: torch.dtype) -> None:
    assert isinstance(linear, nn.Linear) and lora.rank is not None
    linear.__class__ = LoraLinear
    assert isinstance(linear, LoraLinear)
    weight = linear.weight
    linear.scaling = scaling_of(lora)
    linear.dropout = lora.dropout
    a = torch.empty(lora.rank, weight.shape[1], dtype=dtype, device=weight.device)
    initialize("lora_A", a, None)
    linear.lora_A = nn.Parameter(a)
    linear.lora_B = nn.Parameter(torch.zeros(weight.shape[0], lora.rank, dtype=dtype, device=weight.device))


def scaling_of(lora: Lora) -> float:
    assert lora.rank is not None
    return lora.alpha / (math.sqrt(lora.rank) if lora.rslora else lora.rank)


@torch.no_grad()
def initialize(name: str, weight: Tensor, generator: torch.Generator | None) -> None:
    """Give a whole A or B its first values."""
    if name.endswith("lora_A"):
        nn.init.kaiming_uniform_(weight, a=math.sqrt(5), generator=generator)
    else:
        weight.zero_()


def freeze(model: nn.Module, config: Config) -> None:
    """Switch off the gradients of what is not trained."""
    named = list(model.named_parameters(remove_duplicate=False))
    if config.lora.rank is None:
        trained = find_trained(config.training.train_only, [name for name, _ in named])
    else:
        trained = {name for name, _ in named if is_adapter(name)}
    kept = {id(parameter) for name, parameter in named if name in trained}
    for _, parameter in named:
        if id(parameter) not in kept:
            parameter.requires_grad_(False)


def cast_frozen(model: nn.Module, config: Config) -> None:
    """Keep the base in the type that it is computed in, because each pass would make the same of it.

    Without adapters frozen weights are saved, and keep the type of the others.
    """
    for parameter in model.parameters() if config.lora.rank is not None else ():
        is_kept = getattr(parameter, "is_kept_whole", False)  # a router's bias: rounded, it would choose other experts
        if not parameter.requires_grad and parameter.is_floating_point() and not is_kept:
            parameter.data = parameter.data.to(getattr(torch, config.training.mixed_precision_param))
