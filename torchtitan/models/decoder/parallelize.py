"""How tensor-parallel ranks share a decoder: heads, hidden units and the vocabulary are split over them."""

from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel
from torch.distributed.tensor.parallel.style import ParallelStyle

from torchtitan.models.decoder.args import DecoderArgs


def tensor_plan(args: DecoderArgs, split_sequence: bool, loss_parallel: bool) -> dict[str, ParallelStyle]:
    """Styles by module; with `split_sequence` activations between blocks are split along the sequence.

    With `loss_parallel` the logits stay split over the vocabulary.
    """
    whole = Replicate()
    sequence = Shard(1) if split_sequence else whole
    norms: dict[str, ParallelStyle] = {}
    if split_sequence:
        norms = {name: SequenceParallel() for name in ("layers.*.attention_norm", "layers.*.ffn_norm", "norm")}
    if split_sequence and args.head_norms:
        # All heads share these weights, but a rank has only some heads [B, S, H, D]: gradients are summed over ranks.
        for name in ("q_norm", "k_norm"):
            norms[f"layers.*.attention.{name}"] = SequenceParallel(sequence_dim=2, use_local_output=True)
    # Split by rows, as a tied table must be, each rank would create the gradient of the whole table.
    table = RowwiseParallel if args.tied_embeddings else ColwiseParallel
    return {
        **norms,
        "tok_embeddings": table(input_layouts=whole, output_layouts=sequence),
        # cosine, sine and mask are the same on all ranks
        "layers.*.attention": PrepareModuleInput(
            input_layouts=(sequence, None, None, None), desired_input_layouts=(whole, None, None, None)
        ),
        **{f"layers.*.attention.{name}": ColwiseParallel() for name in ("wq", "wk", "wv")},
        "layers.*.attention.wo": RowwiseParallel(output_layouts=sequence),
        "layers.*.feed_forward": PrepareModuleInput(input_layouts=(sequence,), desired_input_layouts=(whole,)),
        **{f"layers.*.feed_forward.{name}": ColwiseParallel() for name in ("w1", "w3")},
        "layers.*.feed_forward.w2": RowwiseParallel(output_layouts=sequence),
        "output": ColwiseParallel(
            input_layouts=sequence,
            output_layouts=Shard(-1) if loss_parallel else whole,
            use_local_output=not loss_parallel,
        ),
    }
