"""A run without its machines: the model under its layout, and a step of it with tensors that have only a shape.

    WORLD_SIZE=512 python train.py --job.config_file train_configs/llama3_405b.toml --comm.mode fake_backend

One process plays one rank of each pipeline stage in turn, the one that holds most. Memory is that of tensors on a GPU;
what the driver, the allocator and libraries take on top is not counted.
"""

import gc
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.utils._python_dispatch import TorchDispatchMode

from torchtitan.config.layout import plan_batch, plan_layout
from torchtitan.config.schema import Config
from torchtitan.data.batch import Batch, Origin
from torchtitan.data.tokenizer import build_tokenizer
from torchtitan.hardware import Place, gpu_memory_bytes
from torchtitan.models.llama.args import FLAVORS, LlamaArgs, count_parameters
from torchtitan.models.llama.stages import plan_stages
from torchtitan.observe.log import logger
from torchtitan.parallel.collectives import GlobalNorm, stop_process_group
from torchtitan.parallel.mesh import build_mesh
from torchtitan.planner.footprint import COLLECTIVES, KINDS, Footprint
from torchtitan.planner.kernels import apply_gpu_attention, gpu_norms
from torchtitan.planner.replay import Replay
from torchtitan.refusal import Refusal
from torchtitan.training import build
from torchtitan.training.loss import build_loss
from torchtitan.training.optimizer import apply_update, build_optimizer, make_states, update_in_backward
from torchtitan.training.step import ForwardBackward

_DEVICE = torch.device("cpu")  # of the fake tensors; a torch without CUDA can have no others


@dataclass(frozen=True)
class Estimate:
    """What one rank holds and moves."""

    rank: int
    parameters: int  # of its pipeline stages, all shards of them together
    peak: dict[str, int]  # bytes by kind, at the moment when they are most together
    moved: dict[str, int]  # bytes of one step by collective

    @property
    def peak_bytes(self) -> int:
        return sum(self.peak.values())


def dry_run(config: Config, place: Place) -> list[Estimate]:
    """Estimate and print every pipeline rank; raises ValueError where one does not fit this machine's GPU."""
    _check(config, place)
    known = config.model.vocab_size or FLAVORS[config.model.name][config.model.flavor].vocab_size
    args = build.build_model_args(config, None if known else build_tokenizer(config.model.hf_assets_path))
    dims = plan_layout(config.parallelism, place.world_size)
    global_batch_size = plan_batch(config.training, dims.dp).global_batch_size
    logger.info(
        f"dry run of {config.job.description}: {count_parameters(args):,} parameters on {place.world_size} ranks, "
        f"mesh {dims}, global batch {global_batch_size} x {config.training.seq_len} tokens"
    )
    if config.compile.enable:
        logger.info("compile.enable = true is left out: this is the step as it is written, not what a compiler makes")
        config = config.model_copy(
            update={
                "compile": config.compile.model_copy(update={"enable": False}),
                "parallelism": config.parallelism.model_copy(update={"enable_async_tensor_parallel": False}),
            }
        )
    if not _can_replay(config, args):
        logger.info("a schedule with backward in two parts: all blocks run, not one of each sort, which takes long")
    capacity = gpu_memory_bytes()
    estimates = []
    for stage in range(dims.pp):
        estimates.append(estimate(config, args, stage * place.world_size // dims.pp, place.world_size))
        if stage == 0:
            print("GiB held at the peak, and GiB moved in a step:")
            print(_row("rank", "stages have", [*KINDS, "peak", *COLLECTIVES], ""))
        print(describe(estimates[-1], capacity), flush=True)
    print(verdict(estimates, capacity))
    return estimates


def _check(config: Config, place: Place) -> None:
    """Refuse what a process without GPU, kernels and compiler cannot know."""
    if place.rank:
        raise Refusal(
            f'comm.mode = "fake_backend" with RANK={place.rank}: one process plays all ranks; start it without '
            f"torchrun, as WORLD_SIZE={place.world_size} python train.py ..."
        )
    offload, mode = config.training.enable_cpu_offload, config.activation_checkpoint.mode
    for found, name, reason, fix in (
        (offload, "training.enable_cpu_offload = true", "the host's memory apart from a GPU's", "set it to false"),
        (config.float8, 'model.converters = ["quantize.linear.float8"]', "what float8 kernels hold", "leave it out"),
        (mode == "memory_budget", f'activation_checkpoint.mode = "{mode}"', "what a compiler keeps", 'use "selective"'),
    ):
        if found:
            raise Refusal(f'comm.mode = "fake_backend" does not know {reason}, which {name} is about; {fix}')


def estimate(
    config: Config, args: LlamaArgs, rank: int, world_size: int, *, gpu: bool = True, replay: bool = True
) -> Estimate:
    """One optimizer step of a rank, with all its local batches, on a GPU or on a CPU.

    Of blocks that are alike one runs, unless told not to.
    """
    dims = plan_layout(config.parallelism, world_size)
    with ExitStack() as stack:
        stack.enter_context(_garbage_held())
        stack.enter_context(_process_group(rank, world_size))
        mesh = build_mesh(dims, _DEVICE.type)
        model = build.lay_out_model(config, args, mesh)
        fake = stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(_AllAgree())
        if gpu:
            stack.enter_context(gpu_norms())
            for part in model.stages.values():
                apply_gpu_attention(part)
        stack.enter_context(warnings.catch_warnings())
        # Only a fake collective is done at once and leaves a view of it; nothing is written to it in place.
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
        footprint = stack.enter_context(Footprint(fake))

        for part in model.stages.values():
            part.to_empty(device=_DEVICE)
        footprint.mark(model.parameters(), "parameters")
        if replay and _can_replay(config, args):
            stages = model.stages.values()
            Replay(footprint).apply(block for part in stages for block in part.get_submodule("layers").children())
        forward_backward = ForwardBackward(
            model, build_loss(config.compile), mesh, config.training, config.parallelism, _DEVICE
        )
        optimizer = build_optimizer(model.named_parameters(), config.optimizer)
        make_states(optimizer)  # a run has them throughout, from its second step on
        states = [value for state in optimizer.state.values() for value in state.values()]
        footprint.mark((value for value in states if isinstance(value, Tensor)), "optimizer")
        norm = GlobalNorm(mesh.stage_group)
        if config.optimizer.early_step_in_backward:
            update_in_backward(optimizer, norm.add, lambda: config.optimizer.lr)
        footprint.moved.clear()

        forward_backward(blank_batch(config, dims.dp))
        footprint.mark((p.grad for p in model.parameters() if p.grad is not None), "gradients")
        norm.add(*model.own_gradients())
        apply_update(optimizer, config.optimizer.lr, norm.total(), config.training.max_norm)
        parameters = sum(p.numel() for p in model.parameters())
        return Estimate(rank, parameters, footprint.peak(), dict(footprint.moved))


def blank_batch(config: Config, dp: int) -> Batch:
    """What the loader gives one rank for a step, without content."""
    size = plan_batch(config.training, dp).global_batch_size // dp, config.training.seq_len
    documents = torch.zeros(size, dtype=torch.int32) if config.model.attn_mask_type == "block_causal" else None
    tokens = torch.zeros(size, dtype=torch.int64)
    return Batch(tokens, tokens.clone(), documents, Origin([], [], []))


def _can_replay(config: Config, args: LlamaArgs) -> bool:
    """Whether backward of a block is one piece."""
    return not plan_stages(args, config.parallelism, config.training.seq_len).backward_in_two_parts


@contextmanager
def _process_group(rank: int, world_size: int) -> Iterator[None]:
    """A process group of which this is one rank; the others answer at once, with nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    _clear_sharding_prop_cache()  # what DTensor remembers names groups that are gone
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        stop_process_group()


@contextmanager
def _garbage_held() -> Iterator[None]:
    """No garbage collection inside, as in a run; fake tensors' many small objects make it a third of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class _AllAgree(TorchDispatchMode):
    """Where a value is read it is 1: all that a step reads is the vote with which torch's pipeline stages begin."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return 1 if func is torch.ops.aten._local_scalar_dense.default else func(*args, **(kwargs or {}))


def describe(estimate: Estimate, capacity: int | None) -> str:
    """The rank's line of the table."""
    values = [*estimate.peak.values(), estimate.peak_bytes, *(estimate.moved.get(name, 0) for name in COLLECTIVES)]
    passes = capacity is None or estimate.peak_bytes <= capacity
    return _row(
        str(estimate.rank),
        f"{estimate.parameters:,}",
        [f"{value / 2**30:.3f}" for value in values],
        "  passes" if passes else "  too large",
    )


def _row(rank: str, parameters: str, values: list[str], last: str) -> str:
    columns = zip([*KINDS, "peak", *COLLECTIVES], values, strict=True)
    return f"{rank:>5} {parameters:>15} " + " ".join(f"{value:>{max(8, len(name))}}" for name, value in columns) + last


def verdict(estimates: list[Estimate], capacity: int | None) -> str:
    """Whether the largest rank fits a device with so many bytes; raises ValueError where it does not."""
    largest = max(estimates, key=lambda estimate: estimate.peak_bytes)
    need = f"rank {largest.rank} holds {largest.peak_bytes / 2**30:.2f} GiB at its peak"
    if capacity is None:
        return f"every pipeline rank passes; {need}, this machine has no GPU to compare with"
    if largest.peak_bytes > capacity:
        raise Refusal(
            f"{need}, but this machine's GPU has {capacity / 2**30:.2f}; use more ranks, a smaller "
            f'training.local_batch_size, or activation_checkpoint.mode = "full"'
        )
    return f"every pipeline rank fits; {need} of this machine's GPU's {capacity / 2**30:.2f}"
