"""Weights that a rank's samples pass by, as an expert that nobody chose: other ranks may have used them."""

from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule

from torchtitan.parallel.collectives import max_over
from torchtitan.refusal import Refusal


class Used:
    """Makes the gradients of several ranks those of one process, which gives a weight that nobody used none.

    FSDP reduces a unit's gradients in one piece, of those weights that have one on this rank. So it must take zeros for
    the others, and what no rank used then loses them again. torch before 2.13 does not take zeros, and a backward in
    two parts does not tell which weights it gave gradients; there, ranks that used other weights end the run.
    """

    def __init__(self, stages: Iterable[nn.Module], replicas: ProcessGroup, in_two_parts: bool) -> None:
        self._replicas, self._seen, self._hooked = replicas, set[nn.Parameter](), dict[nn.Parameter, Tensor]()
        self._all: dict[nn.Parameter, str] = {}
        takes_zeros = hasattr(FSDPModule, "set_reduce_scatter_unused_params") and not in_two_parts
        for stage in stages if replicas.size() > 1 else ():
            self._all |= {p: name for name, p in stage.named_parameters() if p.requires_grad}
            for unit in stage.modules():
                if isinstance(unit, FSDPModule) and takes_zeros:
                    unit.set_reduce_scatter_unused_params(True, recurse=False)
                    unit.register_forward_pre_hook(partial(self._look, list(_of_unit(unit))))

    def _look(self, places: list[tuple[nn.Module, str, nn.Parameter]], *_: object) -> None:
        """FSDP has gathered this unit. What it gathered is another tensor than what the optimizer has."""
        for module, name, own in places:
            gathered = getattr(module, name)
            if own in self._all and self._hooked.get(own) is not gathered:
                self._hooked[own] = gathered
                gathered.register_post_accumulate_grad_hook(lambda _, own=own: self._seen.add(own))

    def settle(self) -> None:
        """After the last backward of a step. The host waits for the other hosts, but for no GPU."""
        if not self._all:
            return
        mine = [p in self._seen if p in self._hooked else p.grad is not None for p in self._all]
        self._seen.clear()
        flags = torch.tensor([mine, [not each for each in mine]], dtype=torch.int32)
        used, passed_by = max_over(flags, self._replicas).tolist()
        for (parameter, name), is_used, is_passed_by in zip(self._all.items(), used, passed_by, strict=True):
            if is_used and is_passed_by and parameter.dim() and parameter not in self._hooked:
                raise Refusal(
                    f"{name} got a gradient on some ranks and none on others, whose samples did not use it, and here "
                    f"FSDP would mix up the gradients; use torch 2.13 (this is {torch.__version__}) with a schedule "
                    "whose backward is not in two parts, or let the model multiply it by zero rows"
                )
            if not is_used:
                parameter.grad = None
            elif parameter.grad is None:  # a single number, which FSDP leaves alone
                parameter.grad = torch.zeros_like(parameter)


def _of_unit(unit: nn.Module) -> Iterable[tuple[nn.Module, str, nn.Parameter]]:
    """The parameters that no unit within has."""
    yield from ((unit, name, parameter) for name, parameter in unit.named_parameters(recurse=False))
    for child in unit.children():
        if not isinstance(child, FSDPModule):
            yield from _of_unit(child)
