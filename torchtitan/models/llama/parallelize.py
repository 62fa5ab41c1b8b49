"""How tensor-parallel ranks share a Llama: heads, hidden units and the vocabulary are split over them."""

from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel
from torch.distributed.tensor.parallel.style import ParallelStyle

from torchtitan.models.llama.args import LlamaArgs


def tensor_plan(args: LlamaArgs, split_sequence: bool, loss_parallel: bool) -> dict[str, ParallelStyle]:
    """Styles by module; with `split_sequence` activations between blocks are split along the sequence.

    With `loss_parallel` the logits stay split over the vocabulary.
    """
    whole = Replicate()
    sequence = Shard(1) if split_sequence else whole
    norms = ("layers.*.attention_norm", "layers.*.ffn_norm", "norm") if split_sequence else ()
    # Split by rows, as a tied table must be, each rank would create the gradient of the whole table.
    table = RowwiseParallel if args.tied_embeddings else ColwiseParallel
    return {
        **{name: SequenceParallel() for name in norms},
        "tok_embeddings": table(input_layouts=whole, output_layouts=sequence),
        # cosine, sine and mask are the same on all ranks
        "layers.*.attention": PrepareModuleInput(
            input_layouts=(sequence, None, None, None), desired_input_layouts=(whole, None, None, None)
        ),
        "layers.*.attention.wq": ColwiseParallel(),
        "layers.*.attention.wk": ColwiseParallel(),
        "layers.*.attention.wv": ColwiseParallel(),
        "layers.*.attention.wo": RowwiseParallel(output_layouts=sequence),
        "layers.*.feed_forward": PrepareModuleInput(input_layouts=(sequence,), desired_input_layouts=(whole,)),
        "layers.*.feed_forward.w1": ColwiseParallel(),
        "layers.*.feed_forward.w2": RowwiseParallel(output_layouts=sequence),
        "layers.*.feed_forward.w3": ColwiseParallel(),
        "output": ColwiseParallel(
            input_layouts=sequence,
            output_layouts=Shard(-1) if loss_parallel else whole,
            use_local_output=not loss_parallel,
        ),
    }
