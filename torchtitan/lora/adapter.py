"""What a run with an adapter knows of its base: where it lies, and a hash of it, which its checkpoints hold instead."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from torchtitan.config.schema import Lora
from torchtitan.lora.names import is_adapter
from torchtitan.parallel.parts import ModelParts
from torchtitan.refusal import Refusal

Named = Mapping[str, Any]


class AdapterParts(ModelParts):
    """A model with an adapter: checkpoints hold the adapter alone."""

    def saved_parameters(self) -> dict[str, Any]:
        return {name: parameter for name, parameter in super().saved_parameters().items() if is_adapter(name)}


class Adapter:
    """The state of a run's adapter, beside its tensors."""

    def __init__(self, lora: Lora) -> None:
        self.lora = lora
        self.load_base: Callable[[], None] = lambda: None  # set by the run
        self.base, self.hash = "", ""  # set when the base is loaded
        self.start: Callable[[], None] = lambda: None  # fills a new adapter, where lora.initial_load_path says so

    def about(self, model: ModelParts, average: Any) -> dict[str, Callable[..., Any]]:
        """What a checkpoint's manifest has of it; `average` is the moving average of the weights, if there is one."""
        return {"state": lambda: self._state(model, average), "load": self._load, "begin": lambda: self.start()}

    def _state(self, model: ModelParts, average: Any) -> dict[str, Any]:
        """Called by all ranks. The norms are those of what an export takes."""
        tensors = {name: tensor for name, tensor in model.saved_parameters().items() if is_adapter(name)}
        if average is not None:
            tensors |= {name.partition(".")[2]: tensor for name, tensor in average.tensors().items()}
        return {"base": self.base, "hash": self.hash, "norms": norms_of(tensors)}

    def _load(self, state: Named, _: Named) -> None:
        """A run that goes on: the checkpoint has filled the adapter, and the base is not in it."""
        self.load_base()
        if state["hash"] != self.hash:
            raise Refusal(
                f"this run's adapter was trained on {state['base']} (SHA-256 {state['hash'][:12]}), and {self.base} "
                f"holds other weights ({self.hash[:12]}); put the former back, set checkpoint.initial_load_path to "
                "it, or start another run, in another job.dump_folder"
            )

    def without_base(self, named: Named) -> dict[str, Any]:
        """The adapter, and buffers, which training may change."""
        return {n: t for n, t in named.items() if is_adapter(n) or not isinstance(t, torch.nn.Parameter)}

    def everyones(self, names: Iterable[str]) -> set[str]:
        """The names that the ranks have, of all stages of a pipeline."""
        everyone: list[list[str]] = [list(names)] * dist.get_world_size()
        if len(everyone) > 1:
            dist.all_gather_object(everyone, everyone[dist.get_rank()])
        return {name for each in everyone for name in each}


@torch.no_grad()
def norms_of(tensors: Mapping[str, Tensor]) -> dict[str, float]:
    """The norm of each whole tensor, of what the ranks hold; a piece that several ranks hold counts once."""
    squares: dict[tuple[str, str], float] = {}
    for name, tensor in tensors.items():
        place, local = "", tensor
        if isinstance(tensor, DTensor):
            place, local = str([list(chunk.offsets) for chunk in tensor.__create_chunk_list__()]), tensor.to_local()
        if local.numel():
            squares[name, place] = float(local.double().square().sum())
    everyone: list[dict[tuple[str, str], float]] = [squares]
    if dist.is_initialized() and dist.get_world_size() > 1:
        everyone = [{}] * dist.get_world_size()
        dist.all_gather_object(everyone, squares)
    found = {key: value for each in everyone for key, value in each.items()}
    totals = dict.fromkeys(sorted(name for name, _ in found), 0.0)
    for (name, _), value in found.items():
        totals[name] += value
    return {name: total**0.5 for name, total in totals.items()}
