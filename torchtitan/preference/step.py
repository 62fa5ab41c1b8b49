"""Forward and backward on pairs: -log sigmoid of how much more the model prefers the chosen one than its reference.

Each pair counts as one, whatever its length: the loss is the mean over the pairs of the global batch, on any layout.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torchtitan.data.batch import Batch
from torchtitan.models.spec import IGNORED
from torchtitan.parallel.collectives import sum_over
from torchtitan.parallel.documents.attention import document_numbers
from torchtitan.training.loss import cross_entropy
from torchtitan.training.step import ForwardBackward, StepLoss

Logits = Callable[..., Tensor]


class PreferenceStep(ForwardBackward):
    """A pair is two documents of a sequence, an even number and the next (data/chat/pairs.py)."""

    metric_names = ("accuracy", "margin")  # how often the chosen one is preferred, and beta times by how much

    def __init__(self, beta: float, reference: Logits, *args: Any) -> None:
        super().__init__(*args)
        self.beta, self.reference = beta, reference

    def __call__(self, batch: Batch) -> StepLoss:
        own_pairs = self._pairs_in(batch.labels, _numbers(batch)).sum()
        cp = self.cp_axis.size()
        all_pairs = (sum_over(own_pairs.clone(), self.token_group) / cp).clamp(min=1)  # ranks of cp have the same
        scale = self.model.loss_scale
        divisor = all_pairs if scale is None else all_pairs / scale.factor
        total = torch.zeros((), device=batch.inputs.device)
        for margins, is_pair in self._margins(batch, self.local_batch_size):
            loss = (-F.logsigmoid(margins) * is_pair).sum()
            (loss / divisor).backward()
            total += loss.detach()
        if self.model.casts is not None:
            self.model.casts.free()
        more = {} if self.model.load is None else {"read_more": self.model.load.read}
        return StepLoss(share=total / all_pairs / cp, own=total / own_pairs.clamp(min=1), **more)

    @torch.no_grad()
    def evaluate(self, batch: Batch, local_batch_size: int) -> Tensor:
        totals = torch.zeros(3, dtype=torch.float64, device=batch.inputs.device)
        count = torch.zeros_like(totals)
        for margins, is_pair in self._margins(batch, local_batch_size):
            totals += torch.stack([(each * is_pair).sum() for each in (-F.logsigmoid(margins), margins > 0, margins)])
            count += is_pair.sum()
        return torch.stack([totals, count], 1).flatten() / self.cp_axis.size()

    def _margins(self, batch: Batch, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """For each local batch, beta times what separates the pairs, and where there is one; both [B, most pairs]."""
        own, positions = self._own_part(batch)
        whole = _numbers(batch)
        ids = whole if positions is None else whole[:, positions]
        parts = zip(ids.split(size), batch.labels.split(size), whole.split(size), strict=True)
        for local, (ids, all_labels, all_ids) in zip(self._local_batches(own, size), parts, strict=True):
            inputs, labels, mask = local
            with torch.no_grad():
                costs = self._costs(self.reference, inputs, labels, positions, mask)
            # Subtract token by token, because sums of many tokens have lost the last bits of a small difference.
            differences = self._summed(costs - self._costs(self.model.stages[0], inputs, labels, positions, mask), ids)
            yield self.beta * (differences[:, 0] - differences[:, 1]), self._pairs_in(all_labels, all_ids)

    def _costs(self, model: Logits, inputs: Tensor, labels: Tensor, positions: Tensor | None, mask: Any) -> Tensor:
        """The cross-entropy of each token, minus the logarithm of its probability. The logits go without a name."""
        return cross_entropy(model(inputs, positions=positions, mask=mask), labels).view(labels.shape)

    def _summed(self, values: Tensor, ids: Tensor) -> Tensor:
        """The sum of each document's values, [B, chosen or rejected, most pairs]."""
        sums = _by_document(values, ids, self._most(ids))
        if self.cp_axis.size() > 1:  # other ranks have other positions; a gradient goes to this rank's own
            everyone = sum_over(sums.detach().clone(), self.cp_axis.get_group())
            sums = sums + (everyone - sums.detach())
        return sums

    def _most(self, ids: Tensor) -> int:
        """How many documents a sequence can hold: a size that does not depend on the data, so no host waits for it."""
        return ids.shape[1] * self.cp_axis.size() + 1 & ~1

    def _pairs_in(self, labels: Tensor, ids: Tensor) -> Tensor:
        counts = _by_document((labels != IGNORED).float(), ids, ids.shape[1] + 1 & ~1)
        return (counts > 0).all(1)


def _numbers(batch: Batch) -> Tensor:
    assert batch.documents is not None
    return document_numbers(batch.documents, batch.labels.shape[1])


def _by_document(values: Tensor, ids: Tensor, most: int) -> Tensor:
    """The sum of each document's values, in pairs."""
    sums = torch.zeros(len(values), most, dtype=values.dtype, device=values.device)
    return sums.scatter_add(1, ids, values).unflatten(1, (-1, 2)).transpose(1, 2)
