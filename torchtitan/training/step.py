"""Forward and backward of one optimizer step: microbatches in turn, one division by the global token count."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torchtitan.data.batch import Batch
from torchtitan.models.llama.model import document_mask
from torchtitan.parallel.collectives import sum_over
from torchtitan.parallel.context import Masks, own_positions, piece_masks
from torchtitan.parallel.mesh import Mesh
from torchtitan.parallel.tensor import split_logits
from torchtitan.training.loss import IGNORED, LossFunction


@dataclass(frozen=True)
class StepLoss:
    """A step's loss as scalars that are still on the device."""

    share: Tensor  # this rank's part of the global mean: the parts of all ranks with other tokens add up to it
    own: Tensor  # the mean over this rank's own tokens


class ForwardBackward:
    """Takes a batch through the model and leaves its gradients in the parameters."""

    def __init__(
        self, model: nn.Module, loss: LossFunction, mesh: Mesh, local_batch_size: int, disable_loss_parallel: bool
    ) -> None:
        self.model, self.loss = model, loss
        self.local_batch_size, self.disable_loss_parallel = local_batch_size, disable_loss_parallel
        # Looked up once: slicing a mesh costs tensor operations.
        self.token_group, self.tp_axis, self.cp_axis = mesh.token_group, mesh.devices["tp"], mesh.devices["cp"]

    def __call__(self, batch: Batch) -> StepLoss:
        batch, positions = self._own_part(batch)
        own_tokens = (batch.labels != IGNORED).sum()
        all_tokens = sum_over(own_tokens.clone(), self.token_group).clamp(min=1)
        total = torch.zeros((), device=batch.inputs.device)
        for inputs, labels, mask in self._microbatches(batch, positions, self.local_batch_size):
            with split_logits(self.tp_axis, self.disable_loss_parallel):
                summed = self._summed_loss(inputs, labels, positions, mask)
                (summed / all_tokens).backward()
            total += summed.detach()
        return StepLoss(share=total / all_tokens, own=total / own_tokens.clamp(min=1))

    @torch.no_grad()
    def evaluate(self, batch: Batch, local_batch_size: int) -> Tensor:
        """This rank's summed loss and number of counted tokens, in float64; no gradients."""
        batch, positions = self._own_part(batch)
        total = torch.zeros((), device=batch.inputs.device)
        for inputs, labels, mask in self._microbatches(batch, positions, local_batch_size):
            with split_logits(self.tp_axis, self.disable_loss_parallel):
                total += self._summed_loss(inputs, labels, positions, mask)
        return torch.stack([total.double(), (batch.labels != IGNORED).sum().double()])

    def _own_part(self, batch: Batch) -> tuple[Batch, Tensor | None]:
        """The positions this rank holds of each sequence; documents stay whole, for the mask."""
        positions = own_positions(batch.inputs.shape[1], self.cp_axis, batch.inputs.device)
        if positions is None:
            return batch, None
        inputs, labels = batch.inputs[:, positions], batch.labels[:, positions]
        return Batch(inputs, labels, batch.document_ids, batch.origin), positions

    def _summed_loss(
        self, inputs: Tensor, labels: Tensor, positions: Tensor | None, mask: Tensor | Masks | None
    ) -> Tensor:
        loss = self.loss(self.model(inputs, positions=positions, mask=mask), labels)
        return loss.to_local() if isinstance(loss, DTensor) else loss

    def _microbatches(
        self, batch: Batch, positions: Tensor | None, size: int
    ) -> Iterator[tuple[Tensor, Tensor, Tensor | Masks | None]]:
        for begin in range(0, len(batch.inputs), size):
            part = slice(begin, begin + size)
            mask: Tensor | Masks | None = None
            if batch.document_ids is not None:
                mask = document_mask(batch.document_ids[part], positions)
            if self.cp_axis.size() > 1:
                mask = piece_masks(batch.inputs.shape[1] * self.cp_axis.size(), self.cp_axis, mask)
            yield batch.inputs[part], batch.labels[part], mask
