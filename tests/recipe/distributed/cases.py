"""What the ranks run; each function is called on every rank as `function(rank, world_size, ...)`."""

import logging
import math
import os
import time
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)
from torch.distributed.tensor.parallel.style import ParallelStyle

from tests.tiny_runs import TINY, tiny_config, train_here
from torchtitan.checkpoint.storage import Storage
from torchtitan.config.schema import Float8
from torchtitan.data import loader
from torchtitan.data.texts import sources
from torchtitan.hardware import Place
from torchtitan.models.decoder.model import TransformerBlock
from torchtitan.models.families import plan_model
from torchtitan.models.layers import rope_table
from torchtitan.observe.health import NotFiniteError
from torchtitan.own_model import run as own_run
from torchtitan.parallel import collectives
from torchtitan.parallel.float8 import apply_float8, float8_plan, update_float8_scales
from torchtitan.parallel.parts import ModelParts
from torchtitan.parallel.tensor import overlap_communication
from torchtitan.refusal import Refusal
from torchtitan.training import run as run_module
from torchtitan.training.assemble import start_run
from torchtitan.training.loss import cross_entropy_sum
from torchtitan.training.optimizer import apply_update, build_optimizer


def train(rank: int, world_size: int, folder: str, overrides: dict[str, Any]) -> list[dict[str, Any]]:
    return train_here(tiny_config(folder, world_size, **overrides), Place(rank, rank, world_size))


class Site(NamedTuple):
    """Ranks of the test that are one site of a swarm."""

    first: int
    count: int
    port: int  # of its own store
    folder: str
    overrides: dict[str, Any]


def train_at_sites(rank: int, _: int, sites: list[Site]) -> list[dict[str, Any]]:
    """Each site is a run of its own."""
    site = next(site for site in sites if site.first <= rank < site.first + site.count)
    os.environ["MASTER_PORT"] = str(site.port)
    own = rank - site.first
    return train_here(tiny_config(site.folder, site.count, **site.overrides), Place(own, own, site.count))


def refused(rank: int, world_size: int, folder: str, overrides: dict[str, Any]) -> str:
    """Trains; what it is refused with, unless that is an older torch."""
    try:
        train(rank, world_size, folder, overrides)
    except Refusal as refusal:
        if "needs torch 2.13" in str(refusal):
            raise
        return str(refusal)
    return "not refused"


def said(rank: int, world_size: int, folder: str, overrides: dict[str, Any]) -> str:
    """Trains; what this rank logged."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("torchtitan")
    logger.addHandler(handler), logger.setLevel("INFO")
    try:
        train(rank, world_size, folder, overrides)
    finally:
        logger.removeHandler(handler)
    return "\n".join(lines)


class Piece(NamedTuple):
    """What one rank holds of a parameter, and where in the whole it begins."""

    begin: tuple[int, ...]
    value: torch.Tensor


def train_and_keep(
    rank: int, world_size: int, folder: str, overrides: dict[str, Any]
) -> tuple[list[dict[str, Any]], dict[str, Piece]]:
    """Trains; the records, and this rank's pieces of the trained parameters."""

    def build_and_keep(*args: Any) -> ModelParts:
        kept.append(build_model(*args))
        return kept[-1]

    kept: list[ModelParts] = []
    build_model = run_module.build_model
    run_module.build_model = build_and_keep  # type: ignore[assignment]
    try:
        records = train(rank, world_size, folder, overrides)
    finally:
        run_module.build_model = build_model  # type: ignore[assignment]
    pieces = {}
    for name, parameter in kept[0].named_parameters():
        pieces[name] = piece_of(parameter)
    return records, pieces


def piece_of(parameter: torch.nn.Parameter) -> Piece:
    if not isinstance(parameter, DTensor):  # the rank is alone
        return Piece((0,) * parameter.dim(), parameter.detach().clone())
    (chunk,) = parameter.__create_chunk_list__()
    return Piece(tuple(chunk.offsets), parameter.detach().to_local().clone())


def precomputed_scales(rank: int, world_size: int, folder: str, overrides: dict[str, Any]) -> tuple[list[float], ...]:
    """The scales that float8 weights carry for their next gather, and those of their whole tensors."""
    from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor

    config = tiny_config(folder, world_size, **overrides)
    model = start_run(config, plan_model(config), Place(rank, rank, world_size)).build_model(0)
    update_float8_scales(model.stages.values(), config.float8)
    carried, expected = [], []
    for parameter in model.parameters():
        assert isinstance(parameter, DTensor)
        if isinstance(local := parameter._local_tensor, WeightWithDynamicFloat8CastTensor):
            carried.append(float(local._precomputed_scale))
            largest = torch.tensor(float(local._tensor.abs().max()))
            dist.all_reduce(largest, op=dist.ReduceOp.MAX)
            expected.append(float(torch.finfo(torch.float8_e4m3fn).max / largest))
    return carried, expected


def float8_block(rank: int, world_size: int) -> tuple[list[str], torch.Size, list[str]]:
    """A block split by torchao's styles, over a group that only pretends: gloo carries no float8.

    The kinds of its styles, the shape of its output, and the parameters that got no finite gradient.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=2)
    axis = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    args = replace(TINY, vocab_size=64)
    block = TransformerBlock(args)
    apply_float8(block, Float8(emulate=True, filter_fqns=["feed_forward.w3"]), compiled=False)
    whole, sequence = Replicate(), Shard(1)
    plan: dict[str, ParallelStyle] = {
        "attention": PrepareModuleInput(
            input_layouts=(sequence, None, None, None), desired_input_layouts=(whole, None, None, None)
        ),
        **{f"attention.{name}": ColwiseParallel() for name in ("wq", "wk", "wv")},
        "attention.wo": RowwiseParallel(output_layouts=sequence),
        "feed_forward": PrepareModuleInput(input_layouts=(sequence,), desired_input_layouts=(whole,)),
        **{f"feed_forward.{name}": ColwiseParallel() for name in ("w1", "w3")},
        "feed_forward.w2": RowwiseParallel(output_layouts=sequence),
    }
    plan = float8_plan(block, plan)
    parallelize_module(block, axis, plan)
    out = block(torch.randn(2, 8, args.dim), *rope_table(torch.arange(16), args.head_size, args.rope_theta), None)
    out.sum().backward()
    without = [name for name, p in block.named_parameters() if p.grad is None]
    return [type(style).__name__ for style in plan.values()], out.shape, without


def overlapped(rank: int, world_size: int) -> tuple[bool, bool]:
    """What the compiler's pass looks at: its switch, and whether the axis's group shares memory."""
    from torch._inductor import config
    from torch.distributed._symmetric_memory import is_symm_mem_enabled_for_group

    collectives.start_process_group(torch.device("cpu"), rank, world_size, 60)
    axis = init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",))
    with config.patch(_micro_pipeline_tp=False):
        overlap_communication(axis)
        return config._micro_pipeline_tp, is_symm_mem_enabled_for_group(axis.get_group().group_name)


def threads_of_gloo(rank: int, world_size: int) -> list[int]:
    """Of the run's group, and of one that a mesh makes."""
    collectives.start_process_group(torch.device("cpu"), rank, world_size, 60)
    group, axis = dist.group.WORLD, init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",)).get_group()
    assert group
    return [each._get_backend(torch.device("cpu")).options._threads for each in (group, axis)]


def train_with_compiled_code_from(
    rank: int, world_size: int, folder: str, overrides: dict[str, Any], cache: str
) -> list[dict[str, Any]]:
    """Trains as a new process would: nothing compiled is there but what the folder holds."""
    torch._dynamo.reset()
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
    try:
        return train(rank, world_size, folder, overrides)
    finally:
        del os.environ["TORCHINDUCTOR_CACHE_DIR"]


def train_with_a_bad_batch(
    rank: int, world_size: int, folder: str, overrides: dict[str, Any], bad_calls: list[int]
) -> str:
    """Trains with a loss of NaN at some calls of rank 1's loss; the message the run ends with, if it fails."""

    def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        summed = cross_entropy_sum(logits, labels)
        return summed * math.nan if rank == 1 and calls in bad_calls else summed

    calls = 0
    build_plain_loss = run_module.build_loss
    run_module.build_loss = lambda compile_: loss  # type: ignore[assignment]
    try:
        train(rank, world_size, folder, overrides)
    except NotFiniteError as error:
        return str(error)
    finally:
        run_module.build_loss = build_plain_loss
    return ""


def train_beside_a_disk(rank: int, world_size: int, folder: str, overrides: dict[str, Any], fault: str) -> str:
    """Trains while one rank's disk is away, stale for once, or slow to remove; the message of what is refused."""

    def is_away(self: Storage, path: str) -> Any:
        raise FileNotFoundError(path)

    def names(self: Storage, folder: str) -> list[str]:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise OSError(116, "Stale file handle")
        return real[1](self, folder)

    def removes_slowly(self: Storage, step: int) -> bool:
        time.sleep(2.5)
        return real[2](self, step)

    calls, real = 0, (Storage._checksum, Storage.names, Storage.remove_unread)
    if fault == "away" and rank == 1:
        Storage._checksum = is_away  # type: ignore[method-assign]
    if fault == "stale" and rank == 1:
        Storage.names = names  # type: ignore[method-assign]
    if fault == "slow":
        Storage.remove_unread = removes_slowly  # type: ignore[method-assign]
    try:
        train(rank, world_size, folder, overrides)
    except ValueError as error:
        return str(error)
    finally:
        Storage._checksum, Storage.names, Storage.remove_unread = real  # type: ignore[method-assign]
    return ""


def parameters_after(
    rank: int, world_size: int, folder: str, steps: int, overrides: dict[str, Any]
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """All parameters, whole, after some steps, and this rank's shards of them."""
    config = tiny_config(folder, world_size, **overrides)
    run = start_run(config, plan_model(config), Place(rank, rank, world_size))
    loader, model = run.build_training_loader(0), run.build_model(0)
    forward_backward = run.build_forward_backward(model)
    optimizer = build_optimizer(model.named_parameters(), config.optimizer)
    norm = collectives.GlobalNorm(run.mesh.stage_group)
    for _ in range(steps):
        batch = loader.next()
        assert batch is not None
        forward_backward(batch)
        norm.add(*model.own_gradients())
        apply_update(optimizer, 3e-3, norm.total(), 1.0)
    loader.close()
    whole, local = {}, {}
    for name, parameter in model.named_parameters():
        tensor = parameter.detach()
        whole[name] = (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()
        local[name] = piece_of(parameter).value
    return whole, local


def exchange(rank: int, world_size: int, folder_of_rank_1: str) -> tuple[bool, list[torch.Tensor], list[torch.Tensor]]:
    """FSDP's exchanges of growing, then smaller tensors: whether by shared memory, what came, and what gloo brings."""
    from torchtitan.parallel import shared_memory

    collectives.start_process_group(torch.device("cpu"), rank, world_size, 60)
    group = dist.group.WORLD
    assert group is not None
    if rank == 1:
        shared_memory._FOLDER = folder_of_rank_1
    gather, reduce_scatter = shared_memory.SharedGather(group), shared_memory.SharedReduceScatter(group)
    came, expected = [], []
    try:
        for numel, dtype in ((3, torch.bfloat16), (5000, torch.float32), (7, torch.uint8)):
            mine = (torch.arange(numel) % 100 + rank).to(dtype)
            everyones = gather.allocate((numel * world_size,), dtype=dtype, device=mine.device)
            everyones[rank * numel : (rank + 1) * numel] = mine
            gather(everyones, everyones[rank * numel : (rank + 1) * numel], group)
            came.append(everyones)
            expected.append(torch.cat([(torch.arange(numel) % 100 + r).to(dtype) for r in range(world_size)]))
            gradients = reduce_scatter.allocate((numel * world_size,), dtype=torch.float32, device=mine.device)
            gradients.copy_(torch.arange(numel * world_size) * (rank + 1))
            summed = reduce_scatter.allocate((numel,), dtype=torch.float32, device=mine.device)
            reduce_scatter(summed, gradients, group, dist.ReduceOp.SUM)
            came.append(summed)
            part = torch.arange(numel * world_size)[rank * numel : (rank + 1) * numel].float()
            expected.append(part * sum(range(1, world_size + 1)))
    finally:
        shared_memory._FOLDER = "/dev/shm"
    return bool(gather._memory.parts(1, torch.uint8)), came, expected


def train_blind_between_ends(
    rank: int, world_size: int, folder: str, overrides: dict[str, Any]
) -> list[dict[str, Any]]:
    """Trains a pipeline in which no rank but the first and the last can open the data."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("this rank needs no data")

    hidden = [(sources, "locate_text"), (loader, "open_source"), (own_run, "SampleLoader")]
    before = [getattr(module, name) for module, name in hidden]
    try:
        if rank not in (0, world_size - 1):
            for module, name in hidden:
                setattr(module, name, refuse)
        return train(rank, world_size, folder, overrides)
    finally:
        for (module, name), value in zip(hidden, before, strict=True):
            setattr(module, name, value)
