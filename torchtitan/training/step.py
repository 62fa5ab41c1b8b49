"""Forward and backward of one optimizer step: one local batch after another, divided once by the global token count."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan.config.schema import Parallelism, Training
from torchtitan.data.batch import Batch
from torchtitan.models.spec import IGNORED
from torchtitan.parallel.collectives import sum_over
from torchtitan.parallel.mesh import Mesh
from torchtitan.parallel.parts import ModelParts
from torchtitan.training.loss import LossFunction

if TYPE_CHECKING:
    from torchtitan.parallel.context import CausalPieces


@dataclass(frozen=True)
class StepLoss:
    """A step's loss as scalars that are still on the device."""

    share: Tensor  # this rank's part of the global mean: the sum over ranks with other tokens is the mean
    own: Tensor  # the mean over this rank's own tokens
    count: Tensor | None = None  # what the gradients are still to be divided by, where it is known only afterwards
    describe: Callable[[], str] | None = None  # what this rank read; called if a loss is not finite, by all ranks
    read_more: Callable[[], dict[str, Any]] = dict  # more of a record, called when it is written, by all ranks


class ForwardBackward:
    """Takes a batch through the model, in a pipeline or not, and leaves its gradients in the parameters."""

    metric_names: tuple[str, ...] = ()  # of validation, beside the loss

    def __init__(
        self,
        model: ModelParts,
        loss: LossFunction,
        mesh: Mesh,
        training: Training,
        parallelism: Parallelism,
        device: torch.device,
    ) -> None:
        self.model, self.loss = model, loss
        self.local_batch_size = training.local_batch_size
        self.pipeline: Callable[..., Tensor] | None = None
        if mesh.dims.pp > 1:
            from torchtitan.parallel.pipeline import Pipeline

            self.pipeline = Pipeline(model, loss, parallelism, getattr(torch, training.mixed_precision_param), device)
        # Look these up once, because slicing a mesh costs tensor operations.
        self.token_group, self.cp_axis = mesh.tokens.get_group(), mesh.devices["cp"]

    def metrics_of_all(self, group: dist.ProcessGroup) -> dict[str, Any]:
        return {}  # a model of one's own may have some

    def __call__(self, batch: Batch) -> StepLoss:
        batch, positions = self._own_part(batch)
        own_tokens = (batch.labels != IGNORED).sum()
        all_tokens = sum_over(own_tokens.clone(), self.token_group).clamp(min=1)
        scale = self.model.loss_scale
        divisor = all_tokens if scale is None else all_tokens / scale.factor
        total = torch.zeros((), device=batch.inputs.device)
        for inputs, labels, mask in self._local_batches(batch, self.local_batch_size):
            if self.pipeline is not None:  # it takes each microbatch forward and backward
                total += self.pipeline(inputs, labels, positions, mask, divisor)
            else:
                loss = self._loss_of(inputs, labels, positions, mask)
                (loss / divisor).backward()
                total += loss.detach()
        if self.model.casts is not None:
            self.model.casts.free()
        for tie in self.model.ties:
            tie.sum_gradients()
        more = {} if self.model.load is None else {"read_more": self.model.load.read}
        return StepLoss(share=total / all_tokens, own=total / own_tokens.clamp(min=1), **more)

    @torch.no_grad()
    def evaluate(self, batch: Batch, local_batch_size: int) -> Tensor:
        """Return this rank's summed loss and its number of counted tokens, in float64. Computes no gradients."""
        batch, positions = self._own_part(batch)
        total = torch.zeros((), device=batch.inputs.device)
        for inputs, labels, mask in self._local_batches(batch, local_batch_size):
            if self.pipeline is not None:
                total += self.pipeline(inputs, labels, positions, mask, None)
            else:
                total += self._loss_of(inputs, labels, positions, mask)
        tokens = (batch.labels != IGNORED).sum() * self.model.has_loss
        return torch.stack([total.double(), tokens.double()])

    def _own_part(self, batch: Batch) -> tuple[Batch, Tensor | None]:
        """Keep this rank's positions of each sequence. The documents are those of whole sequences."""
        if self.cp_axis.size() == 1:
            return batch, None
        from torchtitan.parallel.context import own_positions

        positions = own_positions(batch.inputs.shape[1], self.cp_axis, batch.inputs.device)
        inputs, labels = batch.inputs[:, positions], batch.labels[:, positions]
        return Batch(inputs, labels, batch.documents, batch.origin), positions

    def _loss_of(
        self, inputs: Tensor, labels: Tensor, positions: Tensor | None, mask: "Tensor | CausalPieces | None"
    ) -> Tensor:
        """The summed loss of a whole model."""
        # No name for the logits: they would stay through backward.
        return self.loss(self.model.stages[0](inputs, positions=positions, mask=mask), labels)

    def _local_batches(
        self, batch: Batch, size: int
    ) -> "Iterator[tuple[Tensor, Tensor, Tensor | CausalPieces | None]]":
        for begin in range(0, len(batch.inputs), size):
            part = slice(begin, begin + size)
            if self.model.casts is not None:
                self.model.casts.keeps = part.stop < len(batch.inputs)
            mask: Tensor | CausalPieces | None = None
            if batch.documents is not None:
                mask = batch.documents[part]
            elif self.cp_axis.size() > 1:
                from torchtitan.parallel.context import piece_masks

                mask = piece_masks(batch.inputs.shape[1] * self.cp_axis.size(), self.cp_axis)
            yield batch.inputs[part], batch.labels[part], mask
