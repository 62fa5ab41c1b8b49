"""Measures the loss on held-out data: the same batches every time, each token once, on any number of ranks."""

from typing import TYPE_CHECKING, Any

import torch

from torchtitan.data.loader import Loader
from torchtitan.observe.log import logger
from torchtitan.observe.metrics import MetricsWriter
from torchtitan.observe.peers.no_watch import NoWatch
from torchtitan.parallel.collectives import any_says_so, sum_over
from torchtitan.training.run import Run
from torchtitan.training.step import ForwardBackward

if TYPE_CHECKING:
    from torchtitan.training.checkpoints.best import Best


class Validator:
    """Records the mean loss over the first batches of the data, or over all of it."""

    def __init__(
        self,
        run: Run,
        forward_backward: ForwardBackward,
        loader: Loader | None,
        writer: MetricsWriter | None = None,
        best: "Best | None" = None,
        watch: NoWatch | None = None,
    ) -> None:
        self.config, self.device, self.group = run.config.validation, run.device, run.mesh.losses.get_group()
        self.forward_backward, self.loader, self.writer, self.best = forward_backward, loader, writer, best
        self.local_batch_size = self.config.local_batch_size or run.config.training.local_batch_size
        self._last = 0  # the step of the last validation
        self.scores, self.answers = None, None
        if watch is not None and loader is not None and (self.config.tasks or self.config.chat):  # in a training
            from torchtitan.training.scores.during import build_scores

            self.scores, self.answers = build_scores(run, forward_backward, watch)

    def due(self, step: int) -> bool:
        return self.loader is not None and step % self.config.freq == 0 and step != self._last

    def __call__(self, step: int) -> None:
        self._last = step
        loss, tokens, metrics = self.measure()
        if self.scores is not None:
            metrics |= self.scores.measure(step)
        if self.writer is not None:
            self.writer.write_validation(step, loss, tokens, metrics)
        if self.best is not None:
            self.best.judge(step, {"loss": loss} | metrics)

    @property
    def is_over(self) -> bool:
        """Whether the run is to end early."""
        return self.best is not None and self.best.is_over

    def finish(self, step: int, goes_on: bool) -> None:
        """Validate at the end, unless the records have it. A run that will be resumed validates only when it is due."""
        is_due = self.loader is not None and step != self._last and (not goes_on or self.due(step))
        if is_due and not any_says_so(self.writer is not None and self.writer.has_validated(step)):
            self(step)
        if self.answers is not None and not goes_on:
            self.answers.finish()
        if self.best is not None and self.best.step:
            logger.info(f"the best validation: {self.best}")

    def measure(self) -> tuple[float, int, dict[str, Any]]:
        """Mean loss, number of tokens, and the metrics that a model of one's own has.

        The loader ends on all ranks at once, so every rank runs as many forward passes, which FSDP needs.
        """
        assert self.loader is not None
        self.loader.reset()
        remaining = self.config.steps
        names = self.forward_backward.metric_names
        totals = torch.zeros(2 + 2 * len(names), dtype=torch.float64, device=self.device)
        while remaining and (batch := self.loader.next()) is not None:
            remaining -= 1
            totals += self.forward_backward.evaluate(batch.to(self.device), self.local_batch_size)
        self.forward_backward.model.free_gathered()
        pairs = sum_over(totals, self.group).view(-1, 2).tolist()  # of the loss, then of each metric: sum and count
        loss, *metrics = (total / max(1, count) for total, count in pairs)
        of_all = self.forward_backward.metrics_of_all(self.group)
        return loss, int(pairs[0][1]), dict(zip(names, metrics, strict=True)) | of_all
