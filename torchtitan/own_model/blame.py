"""Names the samples to blame when a step fails, or when its loss is not finite. A good step runs nothing of this.

Each sample of the step is read again and taken through the model alone.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from traceback import extract_tb
from typing import Any

import torch
from torch import nn
from torch.utils.data import IterableDataset

from torchtitan.models.spec import ModelSpec
from torchtitan.own_model.derive import call_with
from torchtitan.own_model.samples import LocalBatch, SampleBatch, SampleOrigin, collate_of, open_dataset, own_draws
from torchtitan.own_model.step import OwnForwardBackward, to_type
from torchtitan.refusal import Refusal, place_of
from torchtitan.training.step import StepLoss

LARGEST = 1 << 28  # parameters of a model that each failing rank may build again on its host


class Blaming(OwnForwardBackward):
    """The same step, which also says what its samples have to do with a failure."""

    def __call__(self, batch: SampleBatch) -> StepLoss:
        with self._blaming(batch.origin, "train"):
            return replace(super().__call__(batch), describe=partial(self._describe, batch.origin))

    def evaluate(self, batch: SampleBatch, local_batch_size: int) -> torch.Tensor:
        with self._blaming(batch.origin, "validation"):
            return super().evaluate(batch, local_batch_size)

    def _describe(self, origin: SampleOrigin) -> str:
        """The samples whose own loss is not finite. All ranks call this together, each for as many samples."""
        dataset, _ = open_dataset(self.spec.data, "train")
        if self._pipeline is not None or isinstance(dataset, IterableDataset):
            return origin.describe()
        collate, bad = collate_of(self.spec), []
        with own_draws("samples to blame"), torch.compiler.set_stance("force_eager"):
            for slot, index in zip(origin.slots, origin.indices, strict=True):
                alone = SampleBatch([LocalBatch(*collate([dataset[index]]), 1)], origin).to(self.device)
                loss, count, *_ = super().evaluate(alone, 1).tolist()
                if not math.isfinite(loss):
                    bad.append(f"slot {slot}: sample {index}, whose own loss is {loss / max(1, count)}")
        if not bad:
            return f"{origin.describe()}\nThe loss of each of these samples alone is finite."
        if others := len(origin.indices) - len(bad):
            bad.append(f"The loss of each of the {others} others alone is finite.")
        return "\n".join(bad)

    @contextmanager
    def _blaming(self, origin: SampleOrigin, split: str) -> Iterator[None]:
        """An error inside becomes a sentence if samples of the step cause it."""
        try:
            yield
        except (Refusal, torch.OutOfMemoryError):
            raise
        except Exception as error:
            of_a_collective = "torch/distributed/" in extract_tb(error.__traceback__)[-1].filename
            if of_a_collective or (known := self.model.structure) is None or known.num_parameters > LARGEST:
                raise
            if said := find_fault(self.spec, split, origin.indices):
                raise Refusal(said) from None
            raise


def find_fault(spec: ModelSpec, split: str, indices: Sequence[int]) -> str | None:
    """Which of these samples fail in a new model on the host, whatever its weights; None if the first of all does."""
    dataset, _ = open_dataset(spec.data, split)
    if isinstance(dataset, IterableDataset):
        return None
    with own_draws("samples to blame"):
        model = spec.build().eval()
        if _fault_of(spec, model, dataset[0]):  # as what needs a GPU
            return None
        found = {index: _fault_of(spec, model, dataset[index]) for index in dict.fromkeys(indices)}
    faults = {index: fault for index, fault in found.items() if fault}
    if not faults:
        return None
    index, fault = next(iter(faults.items()))
    others = f" (and so do {', '.join(map(str, list(faults)[1:9]))})" if len(faults) > 1 else ""
    return f"sample {index} of the data fails in {fault}{others}; correct the sample, or leave it out in `data`"


def _fault_of(spec: ModelSpec, model: nn.Module, sample: Any) -> str | None:
    what = "the step of the ModelSpec"
    try:
        inputs, targets = collate_of(spec)([sample])
        inputs = to_type(inputs, torch.float32)
        if spec.step is not None:
            spec.step(model, inputs, targets)
        what = "the model's forward"
        output = to_type(call_with(model, inputs), torch.float32)
        functions = {f"the metric {name}": metric for name, metric in spec.metrics.items()}
        if spec.loss is not None and spec.step is None:
            functions = {"the loss of the ModelSpec": spec.loss} | functions
        for what, function in functions.items():  # noqa: B007
            function(output, targets)
    except Exception as error:
        said = str(error).strip().partition("\n")[0].rstrip(".")
        return f"{what}{place_of(error)}: {type(error).__name__}: {said}"
    return None
