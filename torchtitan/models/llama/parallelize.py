"""How a Llama meets a mesh: what is kept, split, recomputed, compiled and sharded."""

from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor.parallel.style import ParallelStyle

from torchtitan.config.schema import ActivationCheckpoint, Compile, Parallelism, Training
from torchtitan.models.llama.model import Transformer, attentions
from torchtitan.parallel.context import GatheredAttention
from torchtitan.parallel.cpu_attention import AttentionByProducts
from torchtitan.parallel.float8 import float8_plan
from torchtitan.parallel.fsdp import apply_fsdp
from torchtitan.parallel.mesh import Mesh
from torchtitan.parallel.recompute import apply_recompute
from torchtitan.parallel.tensor import overlap_communication, wait_for_output
from torchtitan.refusal import Refusal


def keep_modules(model: Transformer, names: Sequence[str]) -> None:
    """Turn the whole model into the pipeline stage that holds these modules."""
    for name in ("tok_embeddings", "norm", "output"):
        if name not in names:
            setattr(model, name, None)
    for number in list(model.layers):
        if f"layers.{number}" not in names:
            del model.layers[number]


def apply_parallelism(
    model: Transformer,
    mesh: Mesh,
    parallelism: Parallelism,
    training: Training,
    recompute: ActivationCheckpoint,
    compile_: Compile,
) -> None:
    """Turn a model on the meta device into this rank's part of it: TP, CP, recompute, compile each block, shard."""
    if mesh.dims.tp > 1:
        split_tensors(model, mesh.devices["tp"], parallelism.disable_loss_parallel)
    if parallelism.enable_async_tensor_parallel:
        overlap_communication(mesh.devices["tp"])
    if mesh.dims.cp > 1:
        for attention in attentions(model):
            attention.core = GatheredAttention(mesh.devices["cp"])
    elif compile_.model and mesh.devices.device_type == "cpu":
        for attention in attentions(model):
            attention.core = AttentionByProducts(attention.core)
    apply_recompute(model.layers, recompute)
    if compile_.enable and mesh.dims.tp > 1:
        # What split tensors compile to depends on the rank, but the key it is cached under does not, and with another
        # rank's code a second run would train wrongly: https://github.com/pytorch/pytorch/issues/188390
        torch.compiler.config.cache_key_tag = f"rank {mesh.devices.get_rank()}"
    if compile_.model:
        for layer in model.layers.values():
            layer.compile(backend=compile_.backend, fullgraph=True)
    reshard = parallelism.fsdp_reshard_after_forward
    if reshard == "default" and mesh.dims.pp > 1:
        reshard = "never"  # once gathered, parameters serve all microbatches
    apply_fsdp(model, _sharding_units(model), mesh.fsdp, training, reshard)
    if isinstance(model.tok_embeddings, FSDPModule):  # a unit of its own: backward of a lookup needs no weights
        model.tok_embeddings.set_unshard_in_backward(False)
        model.tok_embeddings.set_reshard_after_forward(reshard != "never")


def split_tensors(
    model: Transformer, axis: DeviceMesh, disable_loss_parallel: bool, split_sequence: bool = True
) -> None:
    """Heads, hidden units and vocabulary over the axis; between blocks, activations are split along the sequence.

    Generation gives single tokens, which cannot be split.
    """
    whole = Replicate()
    sequence = Shard(1) if split_sequence else whole
    norms: dict[str, ParallelStyle] = {}
    if split_sequence:
        norms = {"attention_norm": SequenceParallel(), "ffn_norm": SequenceParallel()}
    block: dict[str, ParallelStyle] = {
        **norms,
        # cosine, sine and mask are the same on all ranks
        "attention": PrepareModuleInput(
            input_layouts=(sequence, None, None, None), desired_input_layouts=(whole, None, None, None)
        ),
        "attention.wq": ColwiseParallel(),
        "attention.wk": ColwiseParallel(),
        "attention.wv": ColwiseParallel(),
        "attention.wo": RowwiseParallel(output_layouts=sequence),
        "feed_forward": PrepareModuleInput(input_layouts=(sequence,), desired_input_layouts=(whole,)),
        "feed_forward.w1": ColwiseParallel(),
        "feed_forward.w2": RowwiseParallel(output_layouts=sequence),
        "feed_forward.w3": ColwiseParallel(),
    }
    for layer in model.layers.values():
        # gloo carries no float8: on CPUs activations travel in their own type
        parallelize_module(layer, axis, block if axis.device_type == "cpu" else float8_plan(layer, block))
    ends: dict[str, ParallelStyle] = {
        "tok_embeddings": RowwiseParallel(input_layouts=whole, output_layouts=sequence),
        **({"norm": SequenceParallel()} if split_sequence else {}),
        "output": ColwiseParallel(
            input_layouts=sequence,
            output_layouts=whole if disable_loss_parallel else Shard(-1),
            use_local_output=disable_loss_parallel,
        ),
    }
    parallelize_module(model, axis, {name: style for name, style in ends.items() if getattr(model, name) is not None})
    for end in (model.tok_embeddings, model.output):
        if end is not None:
            wait_for_output(end)
    if _is_tied(model):
        model.output.weight = model.tok_embeddings.weight  # both were split alike, by rows, but each on its own
    left_out = [name for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor)]
    if split_sequence and left_out:
        raise Refusal(
            f"parallelism.tensor_parallel_degree = {axis.size()}, but nothing says how ranks share {left_out[0]}: each "
            "would train it on its part of the sequence alone; give it a style in models/llama/parallelize.py, or use 1"
        )


def _sharding_units(model: Transformer) -> list[list[torch.nn.Module]]:
    """What is gathered together: the embedding, each block, and norm with output; a tied weight stays with the root."""
    blocks: list[list[torch.nn.Module]] = [[layer] for layer in model.layers.values()]
    if _is_tied(model):
        return blocks
    begin: list[list[torch.nn.Module]] = [[model.tok_embeddings]] if model.tok_embeddings is not None else []
    end: list[torch.nn.Module] = [module for module in (model.norm, model.output) if module is not None]
    return [*begin, *blocks, *([end] if end else [])]


def _is_tied(model: Transformer) -> bool:
    """Whether one weight serves as embedding and output of this stage."""
    return model.args.tied_embeddings and model.tok_embeddings is not None and model.output is not None
