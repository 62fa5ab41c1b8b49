"""What a Llama computes, for the planner; no torch."""

from torchtitan.models.llama.args import LlamaArgs
from torchtitan.models.operations import Attention, Block, Exchange, Pass, Product, Share, Work

_HALF, _BY_OPERATION = {"selective op": 0.5}, {"selective op": 1.0}  # every second product is kept, and attention


def operations(args: LlamaArgs, share: Share) -> Work:
    """Bytes are those of bfloat16. Between layers, activations are split along the sequence over tensor parallelism."""
    tokens, tp = share.tokens, share.tp
    heads, kv_heads = args.n_heads * args.head_size, args.n_kv_heads * args.head_size
    hidden, vocabulary = args.hidden_dim / tp, (args.vocab_size or 1) / tp
    stream = 2 * tokens * args.dim  # bytes of the residual stream
    inner = 2 * tokens * (heads + 2 * kv_heads) / tp
    layer = Block(
        (
            Pass(8 * stream / tp, 13 * stream / tp, again=_BY_OPERATION),  # two norms, two residual additions
            Exchange("gather", stream, count=2, again=_BY_OPERATION),
            Product(tokens, heads / tp, args.dim, again=_HALF),
            Product(tokens, kv_heads / tp, args.dim, count=2, again=_HALF),
            Pass(2 * inner, 2 * inner, again=_BY_OPERATION),  # rotation
            Attention(2 * tokens * share.seq_len * heads / tp),
            Exchange("gather", 2 * tokens * share.cp * 2 * kv_heads / tp, axis="cp"),  # keys and values of all ranks
            Product(tokens, args.dim, heads / tp, again=_HALF),
            Exchange("scatter", stream, count=2),
            Product(tokens, hidden, args.dim, count=2, again=_HALF),
            Pass(6 * tokens * hidden, 10 * tokens * hidden, again=_BY_OPERATION),  # SwiGLU
            Product(tokens, args.dim, hidden, again=_HALF),
        ),
        2 * args.dim * (heads + kv_heads) / tp + 3 * args.dim * hidden + 2 * args.dim,
    )
    ends = Block(
        (
            Pass(2 * stream / tp, 3 * stream / tp),
            Exchange("gather", stream),
            Product(tokens, vocabulary, args.dim, in_float8=False),
            Pass(10 * tokens * vocabulary, 8 * tokens * vocabulary, fuses=False),  # the loss is in float32
        ),
        args.dim * vocabulary + args.dim,
    )
    tables = (1 if args.tied_embeddings else 2) * args.dim * vocabulary
    return Work(layer, args.n_layers, ends, stream / tp, args.n_layers * layer.parameters + tables + args.dim)
