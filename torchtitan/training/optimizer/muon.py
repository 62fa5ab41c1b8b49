"""Muon for some of the matrices, AdamW for everything else, behind one optimizer."""

import logging
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from torchtitan.observe.log import logger
from torchtitan.refusal import Refusal
from torchtitan.training.optimizer.apply import divide_gradients

# On CPUs a change of rank gathers, of which DTensor warns on every rank.
logging.getLogger("torch.distributed.tensor._collective_utils").setLevel(logging.ERROR)


class MuonAndAdamW(torch.optim.Optimizer):
    """Muon for the given matrices and stacks, AdamW for its own parameters, with one learning rate and decay."""

    def __init__(self, found: list[nn.Parameter], adamw: torch.optim.AdamW) -> None:
        options = adamw.defaults
        self.muon, self.adamw = Muon(found, options["lr"], options["weight_decay"]), adamw
        super().__init__([*self.muon.param_groups, *adamw.param_groups], options)
        # All share the groups and the states, so a learning rate set on this optimizer reaches those inside.
        self.muon.state = adamw.state = self.state

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        if self.defaults["fused"]:  # apply_update set the divisor here; Muon does not read it
            self.adamw.grad_scale, self.adamw.found_inf = self.grad_scale, self.found_inf  # type: ignore[attr-defined]
            divide_gradients(self.muon, self.grad_scale)  # type: ignore[attr-defined]
        self.muon.step()
        self.adamw.step()


class Muon(torch.optim.Optimizer):
    """What torch's Muon does, for matrices and for stacks [E, out, in] of them.

    torch's sends parts of a matrix between its ranks at every product. Here, of n equal matrices that n ranks divide,
    each rank takes one whole. Updates are as large as AdamW's (arXiv:2502.16982), so that one learning rate suits both.
    """

    def __init__(self, found: list[nn.Parameter], lr: float, weight_decay: float) -> None:
        of_torch = {"momentum": 0.95, "nesterov": True, "ns_coefficients": (3.4445, -4.775, 2.0315), "eps": 1e-7}
        of_torch |= {"ns_steps": 5, "adjust_lr_fn": "match_rms_adamw"}
        super().__init__(found, {"lr": lr, "weight_decay": weight_decay} | of_torch)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for together in _batches([p for p in group["params"] if p.grad is not None]):
                directions = [self._direction(group, parameter) for parameter in together]
                for parameter, update in zip(together, _orthogonal(directions, group), strict=True):
                    own = _own(parameter)
                    own.mul_(1 - group["lr"] * group["weight_decay"])
                    own.add_(update, alpha=-group["lr"] * 0.2 * max(parameter.shape[-2:]) ** 0.5)

    def _direction(self, group: dict[str, Any], parameter: nn.Parameter) -> Tensor:
        """Nesterov's, in bfloat16."""
        assert parameter.grad is not None
        if not self.state[parameter]:
            self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter.grad)
        gradient, buffer = _own(parameter.grad), _own(self.state[parameter]["momentum_buffer"])
        buffer.lerp_(gradient, 1 - group["momentum"])
        return gradient.lerp(buffer, group["momentum"]).bfloat16()


def _own(tensor: Tensor) -> Tensor:
    """Without the dispatch of a DTensor, where one rank has all of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) and tensor.device_mesh.size() == 1 else tensor


def _batches(parameters: list[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Each alone; or of equal matrices that n ranks divide, n at a time."""
    equal = defaultdict[Any, list[nn.Parameter]](list)
    for parameter in parameters:
        dim = _dim_of_ranks(parameter)
        if dim is None or not isinstance(parameter, DTensor):
            yield [parameter]
        else:
            mesh = parameter.device_mesh
            equal[mesh.size(dim), mesh, parameter.placements, parameter.shape].append(parameter)
    for (num_ranks, *_), found in equal.items():
        yield from (found[begin : begin + num_ranks] for begin in range(0, len(found), num_ranks))


def _dim_of_ranks(tensor: Tensor) -> int | None:
    """The one dim of the mesh whose ranks divide this matrix, if it is one, into plain rows or columns."""
    if not isinstance(tensor, DTensor) or tensor.ndim != 2:
        return None
    sizes, places = tensor.device_mesh.shape, tensor.placements
    dims = [dim for dim, place in enumerate(places) if sizes[dim] > 1 and not place.is_replicate()]
    return dims[0] if len(dims) == 1 and isinstance(places[dims[0]], Shard) else None


def _orthogonal(updates: list[Tensor], group: dict[str, Any]) -> list[Tensor]:
    first = updates[0]
    if not isinstance(first, DTensor):
        return [_newton_schulz(first, group)]
    mesh, places, dim = first.device_mesh, first.placements, _dim_of_ranks(first)
    if dim is None:  # each rank computes all matrices of which it has a part
        of_stack = first.ndim - 3  # for a matrix -1, which no placement has
        whole = [place if getattr(place, "dim", None) == of_stack else Replicate() for place in places]
        return [_with_whole_matrices(first, whole, group)]
    place = places[dim]
    assert isinstance(place, Shard)
    divided = [Shard(place.dim + 1) if other == dim else Replicate() for other in range(mesh.ndim)]
    whole = [Shard(0) if other == dim else Replicate() for other in range(mesh.ndim)]
    local = torch.stack([update.to_local() for update in updates if isinstance(update, DTensor)])
    stack = _as_dtensor(local, mesh, divided, torch.Size([len(updates), *first.shape]))
    found = _with_whole_matrices(stack, whole, group).to_local()
    return [_as_dtensor(each, mesh, places, first.shape) for each in found]


def _with_whole_matrices(stack: DTensor, whole: list[Placement], group: dict[str, Any]) -> DTensor:
    found = _newton_schulz(stack.redistribute(placements=whole).to_local(), group)
    return _as_dtensor(found, stack.device_mesh, whole, stack.shape).redistribute(placements=stack.placements)


def _as_dtensor(local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: torch.Size) -> DTensor:
    strides = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=strides)


def _newton_schulz(update: Tensor, group: dict[str, Any]) -> Tensor:
    a, b, c = group["ns_coefficients"]
    is_tall = update.shape[-2] > update.shape[-1]
    x = update.mT if is_tall else update
    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=group["eps"])
    multiply_and_add = torch.addmm if x.ndim == 2 else torch.baddbmm
    for _ in range(group["ns_steps"]):
        gram = x @ x.mT
        x = multiply_and_add(x, multiply_and_add(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if is_tall else x).contiguous()


def find_matrices(named: Iterable[tuple[str, nn.Parameter]], takes_muon: Callable[[str], bool]) -> list[nn.Parameter]:
    """The matrices for Muon, also in stacks. AdamW keeps norms and biases, and the log lists what else it keeps."""
    matrices, left_to_adamw = [], []
    for name, parameter in named:
        if parameter.ndim > 3 and takes_muon(name):
            raise Refusal(
                f'optimizer.name = "Muon", but {name} has the shape {list(parameter.shape)}, and Muon updates only '
                f'matrices and stacks of them; set optimizer.name = "AdamW", or make the model\'s takes_muon return '
                f"False for this name, so that AdamW updates it"
            )
        if parameter.ndim in (2, 3) and takes_muon(name):
            matrices.append(parameter)
        elif parameter.ndim > 2:
            left_to_adamw.append(re.sub(r"\.\d+\.", ".*.", name))  # one entry for the same weight of all blocks
    if left_to_adamw:
        names = ", ".join(dict.fromkeys(left_to_adamw))
        logger.info(f"AdamW updates these weights, which have too many dimensions for Muon: {names}")
    return matrices
