"""Estimate one rank's memory and traffic: one step with tensors that have a shape and no values.

One process plays the rank. The estimate is the memory of tensors on a GPU, without what the driver, the allocator and
libraries take on top.
"""

import gc
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.pipelining.schedules  # its import makes a tensor, which would be counted in the first step
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from torchtitan.config.layout import plan_batch
from torchtitan.config.schema import Config, other_sections
from torchtitan.data.batch import Batch, Origin
from torchtitan.data.documents import document_starts
from torchtitan.data.tokenizers.tokenizer import build_tokenizer
from torchtitan.hardware import Place
from torchtitan.models.own import OwnBlueprint
from torchtitan.models.spec import Blueprint, ModelSpec
from torchtitan.models.stages import plan_stages
from torchtitan.parallel.collectives import stop_process_group
from torchtitan.parallel.parts import ModelParts, allocate
from torchtitan.refusal import Refusal
from torchtitan.tools.dry_run.footprint import Footprint
from torchtitan.tools.dry_run.kernels import apply_compiled_swiglu, apply_gpu_attention, gpu_norms, real_biases
from torchtitan.tools.dry_run.replay import Replay
from torchtitan.training.assemble import lay_out_ranks
from torchtitan.training.optimizer import make_states
from torchtitan.training.update import Update

DEVICE = torch.device("cpu")  # the fake tensors' device; torch without CUDA cannot have fake tensors on a GPU


@dataclass(frozen=True)
class Estimate:
    """What one rank holds in memory, and what it moves in a step."""

    rank: int
    parameters: int  # in the rank's pipeline stages, counting the shards of all ranks
    peak: dict[str, int]  # bytes by kind, at the moment when their sum is largest
    moved: dict[str, int]  # bytes in one step, by collective
    at_twice_the_load: int = 0  # bytes at the peak of a rank whose experts get twice an even load of tokens

    @property
    def peak_bytes(self) -> int:
        return sum(self.peak.values())


def check_estimable(config: Config) -> None:
    """Refuse what a process without GPU and kernels cannot know the memory of."""
    offload, mode = config.training.enable_cpu_offload, config.activation_checkpoint.mode
    for found, name, reason, fix in (
        (offload, "training.enable_cpu_offload = true", "the host's memory apart from the GPU's", "set it to false"),
        (config.float8, 'model.converters = ["quantize.linear.float8"]', "what float8 kernels hold", "leave it out"),
        (mode == "memory_budget", f'activation_checkpoint.mode = "{mode}"', "what a compiler keeps", 'use "selective"'),
    ):
        if found:
            raise Refusal(f"{name} cannot be estimated: a dry run does not know {reason}; {fix}")


def _uncompiled(config: Config) -> Config:
    compile_ = config.compile.model_copy(update={"enable": False})
    parallelism = config.parallelism.model_copy(update={"enable_async_tensor_parallel": False})
    return config.model_copy(update={"compile": compile_, "parallelism": parallelism})


def estimate(
    config: Config, blueprint: Blueprint, rank: int, world_size: int, *, gpu: bool = True, replay: bool = True
) -> Estimate:
    """Estimate one optimizer step of a rank, with all its local batches, on a GPU or on a CPU.

    Only one of the blocks that do the same work runs. Without `replay` all run, which takes longer. Nothing is
    compiled, but with `compile.enable` each SwiGLU saves what a compiled one does.
    """
    is_compiled, config = config.compile.model, _uncompiled(config)
    blueprint = derived(config, blueprint, world_size)
    with ExitStack() as stack:
        stack.enter_context(_garbage_held())
        stack.enter_context(process_group(rank, world_size))
        run = lay_out_ranks(config, blueprint, Place(rank, 0, world_size), DEVICE)
        model = run.lay_out_model()
        fake = stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(_AllAgree())
        stack.enter_context(real_biases())
        if gpu:
            stack.enter_context(gpu_norms())
            for part in model.stages.values():
                apply_gpu_attention(part, getattr(torch, config.training.mixed_precision_param))
                if is_compiled:
                    apply_compiled_swiglu(part)
        stack.enter_context(warnings.catch_warnings())
        # FSDP warns of views that a block may write to in place. Only fake collectives return such views.
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
        footprint = stack.enter_context(Footprint(fake))
        if blueprint.num_experts:
            from torchtitan.tools.dry_run.experts import even_load

            stack.enter_context(even_load(footprint))

        for part in model.stages.values():
            allocate(part, DEVICE)
        footprint.mark(model.parameters(), "parameters")
        if replay and can_replay(config, blueprint):
            modules = {name: module for part in model.stages.values() for name, module in part.named_modules()}
            Replay(footprint).apply(modules[name] for name in blueprint.layers if name in modules)
        forward_backward = run.build_forward_backward(model)
        optimizer = run.build_optimizer(model)
        make_states(optimizer)  # from its second step on, a run holds the states throughout the step
        states = [value for state in optimizer.state.values() for value in state.values()]
        footprint.mark((value for value in states if isinstance(value, Tensor)), "optimizer")
        update = Update(config, model, optimizer, run.mesh.stage_group, run.learning_rate_factor)
        if update.average is not None:
            footprint.mark(update.average.tensors().values(), "optimizer")
        num_copies = sum(section.num_copies for section in other_sections(config))
        trained = [p for p in model.parameters() if p.requires_grad]
        copies = [torch.zeros_like(p, dtype=torch.float32) for p in trained for _ in range(num_copies)]
        footprint.mark(copies, "optimizer")  # the name keeps them through the step: what is freed is not counted
        if model.casts is not None:
            _mark_casts(model, footprint)
        footprint.moved.clear()
        update.begin(1)
        loss = forward_backward(blank_batch(config, run.blueprint, run.dims.dp))
        footprint.mark((p.grad for p in model.parameters() if p.grad is not None), "gradients")
        update.apply(loss.count)
        parameters = sum(p.numel() for p in model.parameters())
        return Estimate(rank, parameters, footprint.peak(), dict(footprint.moved), footprint.peak_at_twice_the_load())


def _mark_casts(model: ModelParts, footprint: Footprint) -> None:
    """Once forward has cast the weights, count the casts, and the gradients of the local batches before."""
    own = list(model.parameters())

    def mark(part: nn.Module, _: object) -> None:
        footprint.mark(part.parameters(), "parameters")
        footprint.mark((p.grad for p in own if p.grad is not None), "gradients")

    for part in model.stages.values():
        part.register_forward_pre_hook(mark)


def with_counts(config: Config, counts: Sequence[int]) -> Config:
    """The configuration with this cut."""
    parallelism = config.parallelism.model_copy(update={"pipeline_parallel_layer_counts": list(counts)})
    return config.model_copy(update={"parallelism": parallelism})


def derived(config: Config, blueprint: Blueprint, world_size: int) -> Blueprint:
    """The blueprint with what a run finds out first: a tokenizer's vocabulary, the structure of a user's module."""
    if not isinstance(blueprint, OwnBlueprint):
        if blueprint.shape.vocab_size is not None:
            return blueprint
        return blueprint.with_vocabulary(build_tokenizer(config.model.hf_assets_path).vocab_size)
    if blueprint.structure is not None:
        return blueprint
    with process_group(0, world_size):
        return lay_out_ranks(_uncompiled(config), blueprint, Place(0, 0, world_size), DEVICE).blueprint


def blank_batch(config: Config, blueprint: Blueprint, dp: int) -> Any:
    """The batch that the loader gives one rank for a step, with all values 0."""
    rows = plan_batch(config.training, dp).global_batch_size // dp
    if isinstance(blueprint, OwnBlueprint):
        from torchtitan.own_model.samples import LocalBatch, SampleBatch, SampleOrigin

        local = config.training.local_batch_size
        inputs, target = blank_samples(blueprint.spec, local)
        parts = [LocalBatch(inputs, target, local)] * (rows // local)
        return SampleBatch(parts, SampleOrigin(list(range(rows)), []))
    size = rows, config.training.seq_len
    documents = None
    if config.model.attn_mask_type == "block_causal":
        with _disable_current_modes():
            documents = torch.from_numpy(document_starts(np.zeros(size, np.int32)))
    tokens = torch.zeros(size, dtype=torch.int64)
    return Batch(tokens, tokens.clone(), documents, Origin([], [], []))


def blank_samples(spec: ModelSpec, count: int) -> Any:
    """Inputs and target of so many samples like the first, with all values 0."""
    from torchtitan.own_model.record import map_leaves
    from torchtitan.own_model.samples import collate_of, open_dataset, own_draws

    with _disable_current_modes(), own_draws("a blank batch"):  # a dataset or collate may need values
        sample = next(iter(open_dataset(spec.data, "train")[0]))
        batch = collate_of(spec)([sample] * count)
    return map_leaves(lambda v: torch.zeros(v.shape, dtype=v.dtype) if isinstance(v, Tensor) else v, batch)


def can_replay(config: Config, blueprint: Blueprint) -> bool:
    return blueprint.reads_text and runs_every_block(config, blueprint) is None


def runs_every_block(config: Config, blueprint: Blueprint) -> str | None:
    """Why the record of one block does not serve for others."""
    if blueprint.num_experts:
        return "experts of a block may be gathered apart from the rest of it"
    if plan_stages(blueprint.parts(config.training.seq_len), config.parallelism).backward_in_two_parts:
        return "the schedule runs backward in two parts"
    return None


@contextmanager
def process_group(rank: int, world_size: int) -> Iterator[None]:
    """A process group in which this process is one rank and collectives return at once, without the other ranks."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    _clear_sharding_prop_cache()  # DTensor's cache refers to groups of earlier estimates
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        stop_process_group()


@contextmanager
def _garbage_held() -> Iterator[None]:
    """Switch garbage collection off, as a run does; with so many fake tensors it takes a third of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class _AllAgree(TorchDispatchMode):
    """Every value that is read is 1. A step reads only the vote with which torch's pipeline stages begin."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return 1 if func is torch.ops.aten._local_scalar_dense.default else func(*args, **(kwargs or {}))
