"""Turns steps into records: numbers stay on the device until a logged step reads, judges and writes them."""

import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from torchtitan.data.batch import Batch, Origin
from torchtitan.hardware import Peak, peak_memory_gib
from torchtitan.observe.health import judge_window
from torchtitan.observe.log import logger
from torchtitan.observe.metrics import Clock, MetricsWriter, StepRecord
from torchtitan.observe.peers.no_watch import NoWatch
from torchtitan.observe.phases import Phases
from torchtitan.parallel.collectives import max_over, sum_over
from torchtitan.refusal import Refusal
from torchtitan.training.run import Run
from torchtitan.training.step import StepLoss


class Reporter:
    """Collects steps until one is logged. Only `flush` makes the host wait for the device."""

    def __init__(
        self,
        run: Run,
        watch: NoWatch,
        writer: MetricsWriter | None,
        peak: Peak,
        tokens_at: Callable[[int], int],
        skips_in_a_row: int,
    ) -> None:
        self.run, self.training, self.device = run, run.config.training, run.device
        self.watch, self.writer, self.peak, self.tokens_at = watch, writer, peak, tokens_at
        self.skips_in_a_row, self.flops_per_token = skips_in_a_row, run.flops_per_token
        self.loss_group = run.mesh.losses.get_group()  # looked up once: slicing a mesh costs tensor operations
        self.clock, self.phases = Clock(), Phases(run.device)
        self.num_steps = 0  # trained by this process
        self.losses: list[float] = []  # of each logged window, for `summary`
        self._begin, self._warns_of_peak = time.perf_counter(), writer is not None and peak.origin == "measured"
        self._start_window()

    def _start_window(self) -> None:
        self._shares: list[Tensor] = []
        self._own: list[Tensor] = []
        self._norms: list[Tensor] = []
        self._describe: list[Callable[[], str]] = []  # what each step read
        self._data_seconds = 0.0

    def wait_for(self, next_batch: Callable[[], Batch | None]) -> Batch | None:
        """The next batch; the time it takes counts as waiting for data."""
        asked = time.perf_counter()
        batch = next_batch()
        if batch is not None:
            self._data_seconds += time.perf_counter() - asked
            self.phases.mark()
        return batch

    def add(self, origin: Origin, loss: StepLoss, gradient_norm: Tensor) -> None:
        """Collect a step without reading from the device."""
        self.phases.mark()
        self.num_steps += 1
        if self.writer is not None and self.writer.live is not None:
            self.writer.live.stepped()
        self._shares.append(loss.share)
        self._own.append(loss.own)
        self._norms.append(gradient_norm)
        self._describe.append(loss.describe or origin.describe)
        self._read_more = loss.read_more

    def due(self, step: int) -> bool:
        return step == 1 or step % self.run.config.metrics.log_freq == 0 or step == self.training.steps

    def data_ended(self, step: int) -> None:
        """Warn that the data ended after this step; refuse data for less than one step."""
        if step == 0:
            raise Refusal(
                f"the data ends before the first global batch of {self.run.tokens_per_step:,} tokens is full; "
                f"use more text, lower training.global_batch_size, or raise training.epochs"
            )
        logger.warning(f"the data ends after step {step}; raise training.epochs to read it more often")

    def flush(self, step: int, learning_rate: float) -> None:
        """Write the record of the steps since the last one; raises NotFiniteError if they must end the run."""
        if not self._shares:
            return
        with self.watch.reading():
            losses, largest, own, norms = self._read()
            more = self._read_more()
        verdict = judge_window(
            losses,
            norms,
            skip=self.training.on_nonfinite == "skip",
            overflows=self.training.mixed_precision_param == "float16",
            in_a_row=self.skips_in_a_row,
            most_in_a_row=self.training.max_consecutive_skips,
        )
        first = step - len(losses) + 1
        if verdict.stop_at is not None:
            from torchtitan.training.stop import stop

            skips_on_device = self.run.config.optimizer.leaves_out_updates  # an update without a finite gradient norm
            left_out = skips_on_device and not math.isfinite(norms[verdict.stop_at])
            mine = own[verdict.stop_at], self._describe[verdict.stop_at]()
            on_nonfinite, group = self.training.on_nonfinite, self.loss_group
            stop(first + verdict.stop_at, verdict.reason, left_out, on_nonfinite, mine, group, self.run.unit)
        for i in verdict.skipped:
            logger.warning(f"step {first + i}: update left out (loss {losses[i]}, gradient norm {norms[i]})")
        self.skips_in_a_row = verdict.in_a_row
        record = self._record(step, learning_rate, losses, largest, norms, set(verdict.skipped))
        self.losses.append(record.loss)
        if self.writer is not None:
            self.writer.write(replace(record, more=more))
        self._start_window()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stop the clock inside. Steps still queued on the device are completed first and count as training."""
        if self.device.type == "cuda":
            with self.watch.reading():
                torch.cuda.synchronize(self.device)
        with self.clock.outside_training():
            yield

    def summary(self, step: int) -> str:
        """One line on what this process trained, and on the step that the run has reached."""
        if not self.losses:
            return f"nothing left to train after step {step}"
        reached = f", to step {step}," if step != self.num_steps else ""
        trained = f"trained {self.num_steps} steps{reached} in {time.perf_counter() - self._begin:.0f} s"
        finite = [loss for loss in self.losses if math.isfinite(loss)]  # the others are of updates that were left out
        return f"{trained}: " + (f"loss {finite[0]:.3f} to {finite[-1]:.3f}" if finite else "every update was left out")

    def close(self, step: int) -> None:
        """End the records, and log what the run came to and where to look at it."""
        if self.writer is None:
            return
        self.writer.close()
        logger.info(self.summary(step))
        run_folder = self.run.folder
        if self.run.config.job.plan and self.num_steps:
            from torchtitan.observe.planned import report_run

            logger.info(report_run(self.run.config, run_folder, step - self.num_steps))
        logger.info(f"run folder: {run_folder} ({', '.join(sorted(path.name for path in run_folder.glob('[!.]*')))})")
        python = f"{min(os.path.relpath(sys.executable), sys.executable, key=len)} -m"
        if self.run.talks:
            folder = self.run.config.checkpoint.folder
            saved = run_folder if folder == "checkpoint" else folder if "://" in folder else run_folder / folder
            chat = " --chat" if self.training.chat or any(source.chat for source in self.training.sources) else ""
            logger.info(f"let it talk: {python} torchtitan generate --checkpoint {saved}{chat}")
        if self.run.config.metrics.enable_tensorboard:
            logger.info(f"look at it: {python} tensorboard.main --logdir {run_folder}, then open http://localhost:6006")

    def _read(self) -> list[list[float]]:
        """Reduce over ranks and read all numbers from the device at once."""
        shares, own = torch.stack(self._shares).double(), torch.stack(self._own).double()
        losses = sum_over(shares, self.loss_group)
        norms = torch.stack(self._norms).double().to(losses.device)  # with CPU offload the norms are on the host
        return torch.stack([losses, max_over(own.clone(), self.loss_group), own, norms]).tolist()

    def _record(
        self,
        step: int,
        learning_rate: float,
        losses: Sequence[float],
        largest: Sequence[float],
        norms: Sequence[float],
        skipped: set[int],
    ) -> StepRecord:
        counted = [i for i in range(len(losses)) if i not in skipped]
        mean_over = max(1, len(counted))
        step_seconds = self.clock.read() / len(losses)
        forward_backward, updates = self.phases.read()
        tokens_per_second = self.run.tokens_per_step / step_seconds / self.run.place.world_size
        flops = tokens_per_second * self.flops_per_token
        if self._warns_of_peak and flops > self.peak.flops:
            self._warns_of_peak = False
            logger.warning(
                f"a step reached {flops / 1e12:.2f} TFLOP/s, above the peak of {self.peak.flops / 1e12:.2f} measured "
                "at start, so MFU is too high in this run; something slowed the machine down during that measurement"
            )
        return StepRecord(
            step=step,
            loss=sum(losses[i] for i in counted) / mean_over if counted else math.nan,
            max_loss=max((largest[i] for i in counted), default=math.nan),
            grad_norm=sum(norms[i] for i in counted) / mean_over if counted else math.nan,
            lr=learning_rate,
            tokens_seen=self.tokens_at(step),
            tokens_per_second=tokens_per_second,
            tflops=flops / 1e12,
            mfu=flops / self.peak.flops,
            memory_gib=peak_memory_gib(self.device),
            step_seconds=step_seconds,
            data_seconds=self._data_seconds / len(losses),
            forward_backward_seconds=forward_backward / len(losses),
            update_seconds=updates / len(losses),
            eta_seconds=(self.training.steps - step) * step_seconds,
            skipped_updates=len(skipped),
        )
