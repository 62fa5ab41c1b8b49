"""Forward and backward of one optimizer step: microbatches in turn, one division by the global token count."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from torchtitan.data.batch import Batch
from torchtitan.parallel.collectives import sum_over
from torchtitan.training.loss import IGNORED, LossFunction


@dataclass(frozen=True)
class StepLoss:
    """A step's loss as scalars that are still on the device."""

    share: Tensor  # this rank's part of the global mean: the parts of all ranks add up to it
    own: Tensor  # the mean over this rank's own tokens


class ForwardBackward:
    """Takes a batch through the model and leaves its gradients in the parameters."""

    def __init__(self, model: nn.Module, loss: LossFunction, local_batch_size: int, batch_group: ProcessGroup) -> None:
        self.model, self.loss = model, loss
        self.local_batch_size, self.batch_group = local_batch_size, batch_group

    def __call__(self, batch: Batch) -> StepLoss:
        own_tokens = (batch.labels != IGNORED).sum()
        all_tokens = sum_over(own_tokens.clone(), self.batch_group)
        total = torch.zeros((), device=batch.inputs.device)
        for inputs, labels, document_ids in _microbatches(batch, self.local_batch_size):
            summed = self.loss(self.model(inputs, document_ids=document_ids), labels)
            (summed / all_tokens.clamp(min=1)).backward()
            total += summed.detach()
        return StepLoss(share=total / all_tokens.clamp(min=1), own=total / own_tokens.clamp(min=1))

    @torch.no_grad()
    def evaluate(self, batch: Batch, local_batch_size: int) -> Tensor:
        """This rank's summed loss and number of counted tokens, in float64; no gradients."""
        total = torch.zeros((), device=batch.inputs.device)
        for inputs, labels, document_ids in _microbatches(batch, local_batch_size):
            total += self.loss(self.model(inputs, document_ids=document_ids), labels)
        return torch.stack([total.double(), (batch.labels != IGNORED).sum().double()])


def _microbatches(batch: Batch, size: int) -> list[tuple[Tensor, Tensor, Tensor | None]]:
    inputs, labels = batch.inputs.split(size), batch.labels.split(size)
    documents = [None] * len(inputs) if batch.document_ids is None else batch.document_ids.split(size)
    return list(zip(inputs, labels, documents, strict=True))
