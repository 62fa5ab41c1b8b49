"""Pipeline parallelism: torch's schedules take microbatches through the stages that ranks hold.

A rank without the last stage returns a loss of 0, so that the sum over ranks is the loss.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FULL_BACKWARD,
    REDUCE_GRAD,
    PipelineScheduleSingle,
    ScheduleDualPipeV,
    ScheduleZBVZeroBubble,
    _PipelineScheduleRuntime,
    get_schedule_class,
)

from torchtitan.config.schema import Parallelism
from torchtitan.parallel.parts import ModelParts


class Pipeline:
    """Runs a local batch through all stages, forward and backward or forward only."""

    def __init__(
        self,
        parts: ModelParts,
        loss: Callable[[Tensor, Tensor], Tensor],
        parallelism: Parallelism,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.parts, self.loss, self.dtype, self.device = parts, loss, dtype, device
        self.parallelism, self.microbatch_size = parallelism, parallelism.pipeline_parallel_microbatch_size
        self.sequence_shards = parallelism.tensor_parallel_degree  # activations between stages are [B, S / this, dim]
        self._schedules: dict[tuple[int, ...], Any] = {}

    def __call__(
        self, inputs: Tensor, labels: Tensor, positions: Tensor | None, mask: Any, divisor: Tensor | None
    ) -> Tensor:
        """Return the summed loss. With a divisor, also compute the gradients of loss / divisor."""
        batch_size, seq_len = inputs.shape
        if positions is None:  # later stages cannot derive them from their input, which may be split along the sequence
            positions = torch.arange(seq_len, device=inputs.device)
        training = divisor is not None
        key = batch_size, seq_len, training
        schedule = self._schedules.get(key) or self._schedules.setdefault(key, self._build(*key))
        self._divisor, self._total = divisor, torch.zeros((), device=inputs.device)
        (schedule.step if training else schedule.eval)(
            *((inputs,) if 0 in self.parts.stages else ()),
            target=labels,
            return_outputs=False,
            positions=positions.expand(batch_size, -1),
            **({} if mask is None else {"mask": mask}),  # torch 2.11 treats every input as a tensor
        )
        return self._total

    def _loss(self, output: Tensor, labels: Tensor) -> Tensor:
        summed = self.loss(output, labels)
        self._total += summed.detach()
        return summed if self._divisor is None else summed / self._divisor

    def _build(self, batch_size: int, seq_len: int, training: bool) -> Any:
        """Build a schedule for batches of this shape. Passing shapes in spares a trial run of every stage."""
        num_stages = len(self.parts.ranks)
        tokens = torch.empty(self.microbatch_size, seq_len, dtype=torch.long, device="meta")
        between = (self.microbatch_size, seq_len // self.sequence_shards, self.parts.dim)
        activations = torch.empty(between, dtype=self.dtype, device="meta", requires_grad=True)
        logits = torch.empty(
            (self.microbatch_size, seq_len, self.parts.vocab_size), dtype=self.dtype, device="meta", requires_grad=True
        )
        stages = [
            PipelineStage(
                module,
                number,
                num_stages,
                self.device,
                input_args=tokens if number == 0 else activations,
                output_args=logits if number == num_stages - 1 else activations,
                group=self.parts.axis.get_group(),
            )
            for number, module in self.parts.stages.items()
        ]
        count = batch_size // self.microbatch_size
        return build_schedule(self.parallelism, stages, count, self._loss, training)


def build_schedule(
    parallelism: Parallelism, stages: list[PipelineStage], count: int, loss: Callable[..., Tensor], training: bool
) -> Any:
    """The schedule for `count` microbatches. For validation it runs forward only."""
    csv = parallelism.pipeline_parallel_schedule_csv
    by_name = parallelism.pipeline_parallel_schedule
    schedule_class: Any = _PipelineScheduleRuntime if csv else get_schedule_class(by_name)
    if schedule_class is ScheduleDualPipeV and not training:
        schedule_class = ScheduleZBVZeroBubble  # the same stages, without the joint forward and backward
    single = issubclass(schedule_class, PipelineScheduleSingle)
    schedule = schedule_class(stages[0] if single else stages, count, loss, scale_grads=False)
    if csv:
        schedule._load_csv(csv)
    if not training and not single:
        # eval() runs the stages' backward, which fails if two neighbouring stages are on one rank.
        for kind in (FULL_BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, REDUCE_GRAD):
            schedule.register_custom_function(kind, _no_backward)
    return schedule


def _no_backward(action: Any, context: Any) -> None:
    context.schedule_ref.bwd_recv_ops.pop((action.stage_index, action.microbatch_index), None)
