"""What a decoder computes and keeps, for the planner; no torch."""

from typing import Any

from torchtitan.models.decoder.args import DecoderArgs
from torchtitan.models.operations import Attention, Block, Exchange, Operation, Pass, Product, Share, Work

_HALF, _BY_OPERATION = {"selective op": 0.5}, {"selective op": 1.0}  # every second product is kept, and attention
_LAST = {"stopped": 0.0}  # a recompute that stops early ends before the last product, whose output nothing keeps


def operations(args: DecoderArgs, share: Share) -> Work:
    """Bytes are those of bfloat16. Between layers, activations are split along the sequence over tensor parallelism."""
    tokens, tp = share.tokens, share.tp
    heads, kv_heads = args.n_heads * args.head_size, args.n_kv_heads * args.head_size
    hidden, of_norms = args.hidden_dim / tp, 2 * args.dim + 2 * args.head_size * args.head_norms
    stream = 2 * tokens * args.dim  # bytes of the residual stream
    layer = Block(
        (
            *attention(args, share, gathers=2),
            Product(tokens, hidden, args.dim, count=2, again=_HALF),
            Pass(6 * tokens * hidden, 10 * tokens * hidden, again=_BY_OPERATION),  # SwiGLU
            Product(tokens, args.dim, hidden, again=_HALF | _LAST),
            Exchange("scatter", stream, again=_LAST),
        ),
        2 * args.dim * (heads + kv_heads) / tp + 3 * args.dim * hidden + of_norms,
        _kept(args, share),
        of_norms,
        _working(args, share),
    )
    return whole(args, share, layer)


def attention(args: DecoderArgs, share: Share, gathers: int) -> tuple[Operation, ...]:
    """What a layer computes before its feed-forward network, with both norms, and the gathers of both."""
    tokens, tp, stream = share.tokens, share.tp, 2 * share.tokens * args.dim
    heads, kv_heads = args.n_heads * args.head_size, args.n_kv_heads * args.head_size
    inner, turned = 2 * tokens * (heads + 2 * kv_heads) / tp, 2 * tokens * (heads + kv_heads) / tp
    norms = (Pass(2 * turned, 3 * turned, again=_BY_OPERATION),) if args.head_norms else ()
    return (
        Pass(8 * stream / tp, 13 * stream / tp, again=_BY_OPERATION),  # two norms, two residual additions
        Exchange("gather", stream, count=gathers, again=_BY_OPERATION),
        Product(tokens, heads / tp, args.dim, again=_HALF),
        Product(tokens, kv_heads / tp, args.dim, count=2, again=_HALF),
        *norms,
        Pass(2 * inner, 2 * inner, again=_BY_OPERATION),  # rotation
        Attention(2 * tokens * share.seq_len * heads / tp),
        # keys and values of all ranks
        Exchange("gather", 2 * tokens * share.cp * 2 * kv_heads / tp, axis="cp", again=_BY_OPERATION),
        Product(tokens, args.dim, heads / tp, again=_HALF),
        Exchange("scatter", stream),
    )


def whole(args: DecoderArgs, share: Share, layer: Block) -> Work:
    """The model of such layers."""
    tokens, tp, stream = share.tokens, share.tp, 2 * share.tokens * args.dim
    vocabulary = (args.vocab_size or 1) / tp
    ends = Block(
        (
            Pass(2 * stream / tp, 3 * stream / tp),
            Exchange("gather", stream),
            Product(tokens, vocabulary, args.dim, in_float8=False),
            Pass(10 * tokens * vocabulary, 8 * tokens * vocabulary, fuses=False),  # the loss is in float32
            Exchange("all-reduce", 12 * tokens, backward_count=0),  # largest logits; sums, and the labels' logits
        ),
        args.dim * vocabulary + args.dim,
        {"none": 2 * tokens * vocabulary + 2 * stream + stream / tp, "output": 2 * tokens * vocabulary},
        args.dim,
    )
    # A table is split by columns. torch on a CPU, and so the dry run, gathers all columns and cuts its part out.
    columns = Exchange("gather", stream, backward_count=0), Exchange("scatter", stream, count=0, backward_count=1)
    tables = (1 if args.tied_embeddings else 2) * args.dim * vocabulary
    return Work(
        layer,
        args.n_layers,
        ends,
        stream / tp,
        args.n_layers * layer.parameters + tables + args.dim,
        args.dim * vocabulary,
        (Exchange("scatter", stream),) if args.tied_embeddings else columns,
        # The part of a single sequence is a view, so all columns wait.
        (stream - stream / tp) * (share.sequences == 1) * (not args.tied_embeddings),
    )


def _kept(args: DecoderArgs, share: Share) -> dict[str, Any]:
    """Bytes of a layer's activations that wait for its backward, by the mode of recompute."""
    tokens, tp = share.tokens, share.tp
    heads, kv_heads = args.n_heads * args.head_size / tp, args.n_kv_heads * args.head_size / tp
    hidden, stream = args.hidden_dim / tp, 2 * tokens * args.dim
    row = 4 * tokens * args.n_heads / tp  # one float32 a head and token
    few = 8 * tokens / tp  # one float32 a norm and token
    many = 2 * stream / tp + 2 * stream + 4 * tokens * (heads + kv_heads) + 8 * tokens * hidden + row + few
    # Context parallelism repeats the keys and values of each of two prefixes for all query heads.
    many = many + (4 * tokens * share.cp * heads * (1 + 0.5 / share.cp) + tokens * heads) * (share.cp > 1)
    if args.head_norms:  # the inputs of the norms, and a float32 for each head
        many = many + 2 * tokens * (heads + kv_heads) + row * (1 + args.n_kv_heads / args.n_heads)
    half = stream / tp + 2 * tokens * (2 * heads + kv_heads + hidden) + stream + row
    scattered = 2 * stream / tp * (tp > 1)
    of_silu = 2 * tokens * hidden  # a compiled layer computes it once more
    return {"none": many, "selective op": half + scattered, "full": stream / tp, "fused": of_silu}


def _working(args: DecoderArgs, share: Share) -> dict[str, list[tuple[Any, Any]]]:
    """Before the first gradient of a weight, with that of w2, and with all of a layer's."""
    tokens, tp = share.tokens, share.tp
    stream, hidden = 2 * tokens * args.dim, 4 * tokens * args.hidden_dim / tp
    part, of_w2 = stream / tp, args.dim * args.hidden_dim / tp
    heads = 2 * args.dim * (args.n_heads + args.n_kv_heads) * args.head_size / tp
    with_w2 = (hidden + part, of_w2), (hidden / 2 + stream + part, of_w2)
    third = 3 * stream + 3 * part - _kept(args, share)["none"], heads + 3 * of_w2 + 2 * args.dim
    return {"none": [(2 * stream + part, 0), *with_w2, third], "again": [(3 * stream + 4 * part, 0), *with_w2, third]}
