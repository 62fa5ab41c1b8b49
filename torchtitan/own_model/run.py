"""A run of a user's own module. It counts samples instead of tokens, and derive.py finds the parts of its model."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from torchtitan.data.batch import OwnSlots
from torchtitan.data.cursor import Order
from torchtitan.models.own import OwnBlueprint, Structure
from torchtitan.models.spec import ModelSpec
from torchtitan.observe.log import logger
from torchtitan.own_model.blame import Blaming
from torchtitan.own_model.build import OwnParts, build, build_part, is_sharded, lay_out, plan_stages
from torchtitan.own_model.cut import check_stages
from torchtitan.own_model.derive import build_module, candidates_of, derive
from torchtitan.own_model.grouping import Grouping, read_lengths
from torchtitan.own_model.precision import computing, in_its_type
from torchtitan.own_model.record import record
from torchtitan.own_model.rows import dims_of_pairs, output_dims
from torchtitan.own_model.samples import (
    LocalBatch,
    SampleBatch,
    SampleLoader,
    SampleOrigin,
    collate_of,
    open_dataset,
    own_draws,
)
from torchtitan.own_model.step import to_type
from torchtitan.own_model.trials.first_samples import (
    batches_of_many_sizes,
    check_alike,
    check_collate,
    fingerprint,
    first_samples,
)
from torchtitan.own_model.trials.module import check_norms, try_out
from torchtitan.parallel.collectives import any_says_so
from torchtitan.parallel.parts import ModelParts
from torchtitan.refusal import Refusal, blaming
from torchtitan.training.data import own_slots
from torchtitan.training.run import Run


@dataclass(frozen=True)
class OwnRun(Run):
    """What differs from a run on text."""

    @property
    def own(self) -> OwnBlueprint:
        assert isinstance(self.blueprint, OwnBlueprint)
        return self.blueprint

    @property
    def spec(self) -> ModelSpec:
        return self.own.spec

    @property
    def unit(self) -> str:
        return "samples"

    @property
    def talks(self) -> bool:
        return False

    @property
    def tokens_per_step(self) -> int:
        return self.batch.global_batch_size

    def describe_model(self) -> str:
        known, batch = self.own.known, self.batch
        trained = sum(size.numel() for size in known.trained.values())
        frozen = "" if trained == known.num_parameters else f" ({trained:,} of them trained)"
        count = sum(part.kind == "layer" for part in known.parts)
        named = "in one unit, none of it recomputed"
        if count:
            compiled = ", compiled" if self.config.compile.model else ""
            named = f"in {count + 1} units, of which {count} are layers (recompute: "
            named += f"{self.config.activation_checkpoint.mode}{compiled})"
        return (
            f"{self.own.name}: {known.num_parameters:,} parameters{frozen} {named}, global batch "
            f"{batch.global_batch_size} samples, local batches a rank: {batch.num_local_batches}"
        )

    def pick_attention(self) -> AbstractContextManager:
        return nullcontext()

    def build_model(self, seed: int) -> ModelParts:
        model = build(self.config, self.own, self.mesh, self.device, seed)
        if model.adapter is not None:  # a checkpoint has filled the buffers
            model.adapter.load_base = partial(self.load_weights, model, with_buffers=False)
        return model

    def build_optimizer(self, model: ModelParts) -> torch.optim.Optimizer:
        if self.spec.optimizer is None:
            return super().build_optimizer(model)
        from torchtitan.own_model.optimizer import build_own

        return build_own(self.spec, self.own.known, model, self.config.optimizer)

    def learning_rate_factor(self, step: int) -> float:
        if self.spec.schedule is None:
            return super().learning_rate_factor(step)
        with blaming("schedule of the ModelSpec"):
            return float(self.spec.schedule(step, self.config.lr_scheduler.total_steps or self.config.training.steps))

    def load_weights(self, model: ModelParts, with_buffers: bool = True) -> None:
        from torchtitan.own_model.weights import start_from

        section = self.config.checkpoint
        assert isinstance(model, OwnParts) and section.initial_load_path is not None
        if model.adapter is None:
            start_from(section.initial_load_path, model, self.own.known, section.initial_load_missing)
            return
        from torchtitan.weights.base import find_base
        from torchtitan.weights.peft import start_on

        base = find_base(section.initial_load_path)
        start_from(base.where, model, self.own.known, [], with_buffers)
        start_on(model, base)

    def lay_out_model(self) -> ModelParts:
        return lay_out(self.config, self.own, self.mesh, self.device, self.spec.build())

    def build_forward_backward(self, parts: ModelParts) -> Any:
        assert isinstance(parts, OwnParts)
        return Blaming(self.spec, parts, self.mesh, self.config, self.device)

    def build_training_loader(self, seed: int, part: tuple[int, int] = (0, 1)) -> Any:
        slots, training = own_slots(self.batch, self.mesh, part), self.config.training
        grouping = Grouping(self._tell(self._read_lengths), slots.global_batch_size) if self.spec.length else None
        return self._loader("train", slots, Order(slots.num_streams, seed, training.shuffle), grouping)

    def _read_lengths(self) -> Any:
        return read_lengths(open_dataset(self.spec.data, "train")[0], self.spec)

    def build_validation_loader(self) -> Any:
        if not self.config.validation.enable:
            return None
        return self._loader("validation", own_slots(self.batch, self.mesh), Order(self.batch.num_streams, 0, False))

    def _loader(self, split: str, layout: OwnSlots, order: Order, grouping: Grouping | None = None) -> Any:
        is_held_out = split == "validation"
        ask = any_says_so if is_held_out else None
        local = self.config.training.local_batch_size
        if is_held_out:
            local = self.config.validation.local_batch_size or local
        if self.is_between_stages:
            from torchtitan.data.no_data import NoData

            self._compare(None)
            parts = [LocalBatch(None, None, 0)] * (len(layout.own_slots) // local)
            return NoData(lambda: SampleBatch(parts, SampleOrigin(layout.own_slots, [])), ask)
        dataset, is_part = open_dataset(self.spec.data, split)
        self._compare(dataset)
        divided = self.config.validation.enable and not is_part
        return SampleLoader(
            dataset,
            layout,
            order,
            local_batch_size=local,
            fills=self.dims.pp > 1,
            epochs=1 if is_held_out else self.config.training.epochs,
            pads=is_held_out,
            held_out=is_held_out if divided else None,
            workers=self.spec.data_workers,
            is_random=self.spec.data_is_random,
            any_says_so=ask,
            collate=collate_of(self.spec),
            grouping=grouping,
        )

    def _compare(self, dataset: Any) -> None:
        """Refuse data that are not the same on all ranks; one between stages has none."""
        found = None if dataset is None else fingerprint(dataset, self.spec.data_is_random)
        everyone: list[Any] = [None] * self.place.world_size
        dist.all_gather_object(everyone, found)
        check_alike(everyone)

    def prepared(self) -> "OwnRun":
        """Rank 0 looks at the module and at one sample, and tells the others.

        A dry run has looked when it comes to its second rank.
        """
        if self.own.structure is not None:
            return self
        run = self
        if self.config.trains_a_part:
            spec = replace(self.spec, build=partial(build_part, self.spec, self.config))
            run = replace(self, blueprint=replace(self.own, spec=spec))
        return replace(run, blueprint=replace(run.own, structure=run._tell(run._look)))

    def _tell(self, find: Callable[[], Any]) -> Any:
        """What rank 0 finds, or the refusal that it ends in, on all ranks."""
        told: list[Any] = [None]
        if self.place.rank == 0:
            try:
                told = [find()]
            except Refusal as error:
                told = [error]
        dist.broadcast_object_list(told, src=0)
        if isinstance(told[0], Refusal):
            raise told[0]
        return told[0]

    def _look(self) -> Structure:
        dataset, is_part = open_dataset(self.spec.data, "train")
        collate = collate_of(self.spec)
        with blaming("reading the first samples of the ModelSpec's data"):
            samples = first_samples(dataset, self.spec.data_is_random)
            check_collate(collate, samples)
            batches = [collate([samples[0], samples[-1]])]
            if self.dims.pp > 1:
                batches = batches_of_many_sizes(dataset, samples, self.spec)
        with own_draws("a trial"):
            model = build_module(self.spec.build)
        check_norms(model, self)
        known = derive(model, self.spec.layers, collate(samples[:1])[0])
        if self.dims.tp > 1:
            from torchtitan.own_model.tensor_plan import check_plan, words_of

            if self.spec.tensor_plan is None:
                known = replace(known, tensor_words=words_of(model, known.shared, self.dims.tp, self.own.name))
            else:
                check_plan(model, self.spec.tensor_plan(None, False, False), self.dims.tp, collate(samples[:1])[0])
        known = replace(known, changing=try_out(self, self.spec, model, known, samples))
        known = self._in_its_type(model, known, batches)
        logger.info(
            f"{self.own.name} brings its own data, so the configuration's dataset, tokenizer, seq_len and flavor are "
            f"not used{'' if is_part or not self.config.validation.enable else '; every 20th sample is for validation'}"
        )
        return known

    def _in_its_type(self, model: nn.Module, known: Structure, batches: Sequence[Any]) -> Structure:
        """With what is known once the module computes in the type of the run."""
        used = self.config.training.mixed_precision_param
        shards = is_sharded(self.config, self.mesh)
        if used != "float32":
            known = in_its_type(
                self.spec, model, known, batches[0], self.config, shards, on_cpu=self.device.type == "cpu"
            )
        if self.dims.pp == 1:
            return known
        held = getattr(torch, known.held(self.config).training.mixed_precision_param)
        with computing(model, known, self.config, shards):
            known = replace(known, target_dims=dims_of_pairs(batches))
            return self._cut(model, known, [to_type(inputs, held) for inputs, _ in batches])

    def _cut(self, model: nn.Module, known: Structure, batches: Sequence[Any]) -> Structure:
        """With what a pipeline needs to know, once its stages have been tried one after another."""
        with own_draws("a cut"):
            ways = record(model, dict(candidates_of(model, self.spec.layers)), batches, known.changing)
            known = replace(known, ways=ways)
            if self.config.validation.enable:
                output_dims(ways[False])
            check_stages(model, known, plan_stages(self.config, known, self.dims.pp).stages, batches)
        return known
