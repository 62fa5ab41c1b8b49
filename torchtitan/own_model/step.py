"""Forward and backward of a user's model. How many samples count is known only then, so the update divides by it."""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.utils._pytree import tree_map

from torchtitan.config.schema import Config
from torchtitan.models.spec import ModelSpec
from torchtitan.models.stages import BACKWARD_IN_TWO_PARTS
from torchtitan.own_model.build import OwnParts
from torchtitan.own_model.cut import Cut, Stage
from torchtitan.own_model.derive import call_with
from torchtitan.own_model.forms import Form, Sizes, sizes_of
from torchtitan.own_model.record import leaves_of
from torchtitan.own_model.rows import check_constants, check_rows, cut, output_dims
from torchtitan.own_model.samples import LocalBatch, SampleBatch
from torchtitan.own_model.used import Used
from torchtitan.parallel.collectives import sum_over
from torchtitan.parallel.mesh import Mesh
from torchtitan.parallel.pipeline import build_schedule
from torchtitan.refusal import Refusal, blaming
from torchtitan.training.step import StepLoss

KEPT_SCHEDULES = 8  # of a pipeline


class OwnForwardBackward:
    """Leaves in the parameters the gradients of a sum over samples, which the update divides by their number."""

    def __init__(self, spec: ModelSpec, model: OwnParts, mesh: Mesh, config: Config, device: torch.device) -> None:
        self.spec, self.model, self.device = spec, model, device
        self.losses = mesh.losses.get_group()
        self.replicas = mesh.tokens.get_group()
        self.metric_names, known = tuple(spec.metrics), model.structure
        assert known is not None
        used = getattr(torch, config.training.mixed_precision_param)
        self.dtype = getattr(torch, known.held(config).training.mixed_precision_param)
        self.choosing_types: Callable[[], Any] = (
            functools.partial(torch.autocast, device.type, used) if known.mixes_types else nullcontext
        )
        self._numbers = [p for p in model.parameters() if p.dim() == 0]  # which FSDP does not shard
        schedule = config.parallelism.pipeline_parallel_schedule
        in_two_parts = mesh.dims.pp > 1 and schedule in BACKWARD_IN_TWO_PARTS
        self._used = Used(model.stages.values(), self.replicas, in_two_parts)
        self._kept: list[tuple[Any, Any]] = []  # outputs and targets, for metrics of all
        self._pipeline = OwnPipeline(self, config) if mesh.dims.pp > 1 else None

    def __call__(self, batch: SampleBatch) -> StepLoss:
        total, count = self.zeros(2)
        for inputs, targets, valid in self._parts(batch):
            with self.choosing_types():
                if self._pipeline is not None:
                    summed, counted = self._pipeline(inputs, targets, valid, is_training=True)
                else:
                    summed, counted = self._loss(inputs, targets, valid)
            if self._pipeline is None:
                self.scaled(summed).backward()
            total += summed.detach()
            count += counted
        self._used.settle()
        for tie in self.model.ties:
            tie.sum_gradients()
        for parameter in self._numbers:
            if parameter.grad is not None:
                sum_over(parameter.grad, self.replicas)
        all_samples = sum_over(count.clone(), self.losses).clamp(min=1)
        return StepLoss(share=total / all_samples, own=total / count.clamp(min=1), count=all_samples)

    def scaled(self, loss: Tensor) -> Tensor:
        return loss if self.model.loss_scale is None else loss * self.model.loss_scale.factor

    @torch.no_grad()
    def evaluate(self, batch: SampleBatch, _: int) -> Tensor:
        """Sum and count of the loss, then of each metric, in float64."""
        totals = self.zeros(2 + 2 * len(self.metric_names)).double()
        for stage in self.model.stages.values():
            stage.eval()
        for inputs, targets, valid in self._parts(batch):
            with self.choosing_types():
                if self._pipeline is not None:
                    totals += self._pipeline(inputs, targets, valid, is_training=False)
                    continue
                # Where nothing counts, too: all ranks gather the weights together.
                loss = None if self.spec.step is None else self._loss(inputs, targets, valid)
                output = call_with(self.model.stages[0], inputs)
                totals += self.measure(output, targets, valid, loss) if valid else 0
        for stage in self.model.stages.values():
            stage.train()
        return totals

    def _parts(self, batch: SampleBatch) -> Iterator[LocalBatch]:
        """Inputs in the type that the model computes in, and targets as they are."""
        return (part._replace(inputs=to_type(part.inputs, self.dtype)) for part in batch.parts)

    def zeros(self, count: int) -> Tensor:
        return torch.zeros(count, device=self.device)

    def _loss(self, inputs: Any, targets: Any, valid: int) -> tuple[Tensor, Tensor]:
        if self.spec.step is not None:
            return as_counted(self._step(inputs, targets), valid)
        return self.loss_of(call_with(self.model.stages[0], inputs), targets, valid)

    def _step(self, inputs: Any, targets: Any) -> Any:
        """The step takes the place of the model's forward, so FSDP has gathered what parts of the model need."""
        model, step = self.model.stages[0], self.spec.step
        assert step is not None

        def instead() -> Any:
            del model.forward
            with _without_fsdp(model):
                return step(model, inputs, targets)

        model.forward = instead
        return model()

    def loss_of(self, output: Any, targets: Any, valid: int) -> tuple[Tensor, Tensor]:
        assert self.spec.loss is not None
        return as_counted(self.spec.loss(to_type(output, torch.float32), targets), valid)

    def measure(self, output: Any, targets: Any, valid: int, loss: tuple[Tensor, Tensor] | None = None) -> Tensor:
        numbers = [*(loss or self.loss_of(output, targets, valid))]
        output = to_type(output, torch.float32)
        if self.spec.metrics_of_all:
            self._kept.append(
                tree_map(lambda leaf: leaf.cpu() if isinstance(leaf, Tensor) else leaf, (output, targets))
            )
        for metric in self.spec.metrics.values():
            numbers += as_counted(metric(output, targets), valid)
        return torch.stack([number.detach().double() for number in numbers])

    def metrics_of_all(self, group: dist.ProcessGroup) -> dict[str, Any]:
        """On rank 0, the metrics of all outputs that `evaluate` has seen."""
        ranks = dist.get_process_group_ranks(group)
        kept, self._kept = self._kept, []
        if not self.spec.metrics_of_all or 0 not in ranks:
            return {}
        everyone: list[Any] = [None] * len(ranks)
        dist.gather_object(kept, everyone if dist.get_rank() == 0 else None, dst=0, group=group)
        if dist.get_rank():
            return {}
        output, target = _joined([batch for each in everyone for batch in each])
        found = {}
        for name, metric in self.spec.metrics_of_all.items():
            with blaming(f"the metric {name} of the ModelSpec"):
                value = metric(output, target)
                found[name] = value.tolist() if hasattr(value, "tolist") else float(value)
        return found


class OwnPipeline:
    """Takes a local batch through the stages by one of torch's schedules."""

    def __init__(self, owner: OwnForwardBackward, config: Config) -> None:
        self.owner, self.model = owner, owner.model
        self.parallelism, self.local_batch_size = config.parallelism, config.training.local_batch_size
        self._schedules: dict[tuple[bool, Sizes], Any] = {}  # the newest last
        assert self.model.structure is not None
        self._known = self.model.structure
        self._output_dims = output_dims(self.model.cuts[False].way) if config.validation.enable else ()
        ends = self.model.ranks[0], self.model.ranks[-1]
        self._tells = owner.spec.collate is not None and any(rank not in ends for rank in self.model.ranks)

    def __call__(self, inputs: Any, targets: Any, valid: int, is_training: bool) -> Tensor:
        """The batch's sums, zero on a rank without the last stage; in training, gradients of the loss as well."""
        if inputs is not None:
            check_constants(inputs, self._known.example)
        check_rows(targets, self._known.target_dims, self.local_batch_size)
        self._targets, self._valid, self._is_training = targets, valid, is_training
        self._totals = self.owner.zeros(2 if is_training else 2 + 2 * len(self.owner.metric_names)).double()
        args = [leaf for leaf in leaves_of(inputs)[0] if isinstance(leaf, Tensor)]
        sizes = self._sizes(args, self.model.cuts[is_training])
        schedule = self._schedule(is_training, sizes)
        if 0 not in self.model.stages:
            args = []
        rows = torch.arange(self.local_batch_size, device=self.owner.device)  # stand for the targets, of any kind
        try:
            (schedule.step if is_training else schedule.eval)(*args, target=rows, return_outputs=False)
        except RuntimeError as error:  # torch wraps what a stage's forward raises
            if isinstance(error.__cause__, Refusal):
                raise error.__cause__ from None
            raise
        return self._totals

    def _sizes(self, args: Sequence[Tensor], cut: Cut) -> Sizes:
        """The sizes of a microbatch's inputs. Where collate makes them vary, rank 0 sends them."""
        forms, rows = [cut.way.forms[value] for value in cut.arriving[0]], self.local_batch_size
        sizes = sizes_of(args) or tuple(form.shape(((rows,),)) for form in forms if not self._tells)
        if args:
            _check_sizes(sizes, forms)
        if self._tells:
            known = [size for each in sizes for size in each] or [0] * sum(len(form.sizes) for form in forms)
            told = torch.tensor(known, device=self.owner.device)
            dist.broadcast(told, group=self.model.axis.get_group(), group_src=0)
            numbers = iter(told.tolist())
            sizes = tuple(tuple(itertools.islice(numbers, len(form.sizes))) for form in forms)
        size = self.parallelism.pipeline_parallel_microbatch_size
        return tuple((first * size // rows, *others) for first, *others in sizes)

    def _schedule(self, is_training: bool, sizes: Sizes) -> Any:
        """For microbatches of these sizes. It holds memory for what travels, so only the newest are kept."""
        key = is_training, sizes
        self._schedules[key] = schedule = self._schedules.pop(key, None) or self._build(is_training, sizes)
        if len(self._schedules) > KEPT_SCHEDULES:
            del self._schedules[next(iter(self._schedules))]
        for stage in self.model.stages.values():
            assert isinstance(stage.forward, Stage)
            stage.forward.sizes = sizes
        return schedule

    def _build(self, is_training: bool, sizes: Sizes) -> Any:
        cut = self.model.cuts[is_training]

        def forms(stage: int) -> tuple[Tensor, ...]:
            known = [cut.way.forms[value] for value in cut.arriving[stage]]
            return tuple(form.zeros(sizes, "meta").requires_grad_(form.requires_grad) for form in known)

        stages = [
            PipelineStage(
                module,
                number,
                len(self.model.ranks),
                self.owner.device,
                input_args=forms(number),
                output_args=forms(number + 1),
                group=self.model.axis.get_group(),
            )
            for number, module in self.model.stages.items()
        ]
        count = self.local_batch_size // self.parallelism.pipeline_parallel_microbatch_size
        return build_schedule(self.parallelism, stages, count, self._loss, is_training)

    def _loss(self, leaves: Any, rows: Tensor) -> Tensor:
        """Of one microbatch."""
        begin = int(rows.storage_offset())  # torch's schedules split the targets into views
        valid = max(0, min(self._valid - begin, len(rows)))
        leaves = leaves if isinstance(leaves, tuple | list) else [leaves]
        if not self._is_training:
            leaves = cut(leaves, self._output_dims, 0, valid)
        last = self.model.stages[len(self.model.ranks) - 1].forward
        assert isinstance(last, Stage)
        output = last.assembled(leaves)
        targets = cut(self._targets, self._known.target_dims, begin, valid)
        if not self._is_training:
            self._totals += self.owner.measure(output, targets, valid) if valid else 0
            return self._totals[0]
        summed, count = self.owner.loss_of(output, targets, valid)
        self._totals += torch.stack([summed.detach(), count]).double()
        return self.owner.scaled(summed)


def _check_sizes(sizes: Sizes, forms: Sequence[Form]) -> None:
    """Refuse inputs whose sizes vary otherwise than those of the first samples: other ranks wait for what follows."""
    lengths = [len(size) for size in sizes] == [len(form.sizes) for form in forms]
    for number, size in enumerate(sizes):
        if not lengths or size != forms[number].shape(sizes):
            raise Refusal(
                f"a batch's inputs have the sizes {' and '.join(str(list(size)) for size in sizes)}, where the first "
                f"samples' have {' and '.join(f'[{form}]' for form in forms)}, and a pipeline knows no others; let "
                "collate pad to such sizes, or use parallelism.pipeline_parallel_degree = 1"
            )


def as_counted(result: Any, num_samples: int) -> tuple[Tensor, Tensor]:
    """(sum, count) as it is; a mean counts the samples. A number is filled in: its copy would wait for the GPU."""
    total, count = result if isinstance(result, tuple) else (result * num_samples, num_samples)
    if not isinstance(count, Tensor):
        count = torch.full((), float(count), device=total.device)
    return total, count.to(total.device, torch.float32)


def _joined(batches: Sequence[Any]) -> Any:
    """All batches as one."""

    def join(*leaves: Any) -> Any:
        if not isinstance(leaves[0], Tensor):
            return list(leaves)
        if len({leaf.shape[1:] for leaf in leaves}) > 1:
            raise Refusal(
                "metrics_of_all of the ModelSpec: outputs or targets of batches differ in size, as "
                f"{list(leaves[0].shape)} and {list(leaves[-1].shape)}; let collate pad all batches to one size"
            )
        return torch.cat(leaves) if leaves[0].dim() else torch.stack(leaves)

    return tree_map(join, *batches)


@contextmanager
def _without_fsdp(model: nn.Module) -> Iterator[None]:
    """Inside, the model itself is as the user built it; its parts still gather their weights."""
    kept = {name: hooks for name, hooks in vars(model).items() if name in ("_forward_pre_hooks", "_forward_hooks")}
    for name, hooks in kept.items():
        setattr(model, name, type(hooks)((key, hook) for key, hook in hooks.items() if not _is_fsdps(hook)))
    try:
        yield
    finally:
        vars(model).update(kept)


def _is_fsdps(hook: Any) -> bool:
    return type(getattr(hook, "__self__", None)).__module__.startswith("torch.distributed.fsdp")


def to_type(value: Any, dtype: torch.dtype) -> Any:
    """Only numbers with a point change their type."""

    def convert(leaf: Any) -> Any:
        return leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

    return tree_map(convert, value)
