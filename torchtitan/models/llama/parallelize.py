"""How a Llama meets a mesh: what is split, recomputed, compiled and sharded, in which order, and how weights begin.

The pipeline's stage split belongs here too when it comes; the model file stays as it is.
"""

import hashlib

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)
from torch.distributed.tensor.parallel.style import ParallelStyle

from torchtitan.config.schema import ActivationCheckpoint, Compile, Parallelism, Training
from torchtitan.models.llama.model import Transformer, fill_initial
from torchtitan.parallel.context import GatheredAttention
from torchtitan.parallel.fsdp import apply_fsdp, copy_first_replica
from torchtitan.parallel.mesh import Mesh
from torchtitan.parallel.recompute import apply_recompute
from torchtitan.parallel.tensor import apply_tensor_parallel, wait_for_output


def apply_parallelism(
    model: Transformer,
    mesh: Mesh,
    parallelism: Parallelism,
    training: Training,
    recompute: ActivationCheckpoint,
    compile_: Compile,
) -> None:
    """Turn a model on the meta device into this rank's part of it: TP, CP, recompute, compile each block, shard."""
    _split_tensors(model, mesh.devices["tp"], parallelism.disable_loss_parallel)
    if mesh.dims.cp > 1:
        for layer in model.layers.values():
            layer.attention.core = GatheredAttention(mesh.devices["cp"])
    apply_recompute(model.layers, recompute)
    if compile_.enable and mesh.dims.tp > 1:
        # What split tensors compile to depends on the rank, but the key it is cached under does not, and with another
        # rank's code a second run would train wrongly: https://github.com/pytorch/pytorch/issues/188390
        torch.compiler.config.cache_key_tag = f"rank {mesh.devices.get_rank()}"
    if compile_.enable and "model" in compile_.components:
        for layer in model.layers.values():
            layer.compile(backend=compile_.backend, fullgraph=True)
    apply_fsdp(
        model,
        _sharding_units(model),
        mesh.fsdp,
        param_dtype=getattr(torch, training.mixed_precision_param),
        reduce_dtype=getattr(torch, training.mixed_precision_reduce),
        reshard=parallelism.fsdp_reshard_after_forward,
    )


def _split_tensors(model: Transformer, axis: DeviceMesh, disable_loss_parallel: bool) -> None:
    """Heads, hidden units and vocabulary over the axis; between blocks, activations are split along the sequence."""
    sequence, whole = Shard(1), Replicate()
    block: dict[str, ParallelStyle] = {
        "attention_norm": SequenceParallel(),
        # cosine, sine and mask are the same on all ranks
        "attention": PrepareModuleInput(
            input_layouts=(sequence, None, None, None), desired_input_layouts=(whole, None, None, None)
        ),
        "attention.wq": ColwiseParallel(),
        "attention.wk": ColwiseParallel(),
        "attention.wv": ColwiseParallel(),
        "attention.wo": RowwiseParallel(output_layouts=sequence),
        "ffn_norm": SequenceParallel(),
        "feed_forward": PrepareModuleInput(input_layouts=(sequence,), desired_input_layouts=(whole,)),
        "feed_forward.w1": ColwiseParallel(),
        "feed_forward.w2": RowwiseParallel(output_layouts=sequence),
        "feed_forward.w3": ColwiseParallel(),
    }
    for layer in model.layers.values():
        apply_tensor_parallel(layer, axis, block)
    ends: dict[str, ParallelStyle] = {
        "tok_embeddings": RowwiseParallel(input_layouts=whole, output_layouts=sequence),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(
            input_layouts=sequence,
            output_layouts=whole if disable_loss_parallel else Shard(-1),
            use_local_output=disable_loss_parallel,
        ),
    }
    apply_tensor_parallel(model, axis, ends)
    for end in (model.tok_embeddings, model.output):
        wait_for_output(end)
    if model.args.tied_embeddings:
        model.output.weight = model.tok_embeddings.weight  # both were split alike, by rows, but each on its own


def _sharding_units(model: Transformer) -> list[list[torch.nn.Module]]:
    """What is gathered together: the embedding, each block, and norm with output; a tied weight stays with the root."""
    blocks: list[list[torch.nn.Module]] = [[layer] for layer in model.layers.values()]
    if model.args.tied_embeddings:
        return blocks
    return [[model.tok_embeddings], *blocks, [model.norm, model.output]]


def init_weights(model: Transformer, mesh: Mesh, device: torch.device, seed: int) -> None:
    """Allocate this rank's part on the device and fill it with values that depend on seed and name, not on the layout.

    Each rank draws every whole parameter it has a part of, one at a time, and keeps its part. Kinds of devices have
    generators of their own, so another kind gives other values.
    """
    model.to_empty(device=device)
    for name, parameter in model.named_parameters():
        name = name.replace("_checkpoint_wrapped_module.", "")
        digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
        generator = torch.Generator(device).manual_seed(int.from_bytes(digest[:7], "little"))
        whole = torch.empty(parameter.shape, dtype=torch.float32, device=device)
        fill_initial(name, whole, model.args, generator)
        _keep_part(parameter, whole)
    copy_first_replica(model, mesh.devices["dp_replicate"])


@torch.no_grad()
def _keep_part(parameter: Tensor, whole: Tensor) -> None:
    """Copy the slice of `whole` that this rank holds of a sharded parameter."""
    if isinstance(parameter, DTensor):
        for chunk in parameter.__create_chunk_list__():  # DTensor's description of itself for checkpoints
            for dim, (offset, size) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
                whole = whole.narrow(dim, offset, size)
        parameter = parameter.to_local()
    if parameter.numel():  # a rank beyond the last row holds nothing
        parameter.copy_(whole)
