"""Loss on held-out data: the same batches every time, each token counted once, on however many ranks."""

from dataclasses import dataclass

import torch
from torch.distributed import ProcessGroup

from torchtitan.config.schema import Validation
from torchtitan.data.loader import Loader
from torchtitan.observe.metrics import MetricsWriter
from torchtitan.parallel.collectives import sum_over
from torchtitan.parallel.fsdp import free_gathered
from torchtitan.training.step import ForwardBackward


@dataclass(frozen=True)
class Validator:
    """Called after a step, records the mean loss over the first batches of the data, or over all of it."""

    config: Validation
    forward_backward: ForwardBackward
    loader: Loader
    device: torch.device
    loss_group: ProcessGroup
    writer: MetricsWriter | None

    def __call__(self, step: int) -> None:
        loss, tokens = self.measure()
        if self.writer is not None:
            self.writer.write_validation(step, loss, tokens)

    def measure(self) -> tuple[float, int]:
        """Mean loss and number of tokens.

        The loader ends on all ranks at once, so every rank runs as many forward passes, which FSDP needs.
        """
        self.loader.reset()
        remaining = self.config.steps
        totals = torch.zeros(2, dtype=torch.float64, device=self.device)
        while remaining and (batch := self.loader.next()) is not None:
            remaining -= 1
            totals += self.forward_backward.evaluate(batch.to(self.device), self.config.local_batch_size)
        free_gathered(self.forward_backward.model.stages.values())
        summed, tokens = sum_over(totals, self.loss_group).tolist()
        return summed / max(1, tokens), int(tokens)
