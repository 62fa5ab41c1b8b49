"""What a GPT or a Llama computes and keeps when Megatron-LM trains it, for the planner; no torch.

It serves predictions of published runs. The recipe does not train these models in this way.
"""

from dataclasses import dataclass

from torchtitan.models.operations import Attention, Block, Exchange, Number, Operation, Pass, Product, Share, Work

_ATTENTION = {"attention": 1.0}


@dataclass(frozen=True)
class Shape:
    hidden: Number
    inner: Number
    heads: Number
    kv_heads: Number
    head_size: Number
    num_layers: int
    vocabulary: Number
    gated: bool  # SwiGLU in place of GELU
    tied: bool = True  # the table before the layers is the output layer, too


@dataclass(frozen=True)
class Kernels:
    """How the software computes it."""

    fused_attention: bool = False
    splits_sequence: bool = False  # tensor parallelism splits the sequence between layers
    gathers_again: bool = False  # backward gathers what forward gathered and did not keep
    dropout: bool = True
    fused_loss: bool = False  # one kernel; Megatron-LM's own is eight, on logits in float32


def work(shape: Shape, kernels: Kernels, share: Share) -> Work:
    hidden, tp, tokens = shape.hidden, share.tp, share.tokens
    heads, kv_heads, inner = (
        n / tp for n in (shape.heads * shape.head_size, shape.kv_heads * shape.head_size, shape.inner)
    )
    stream = 2 * tokens * hidden
    own = tokens * hidden / (tp if kernels.splits_sequence else 1)  # elements of what lies between the layers
    kinds: tuple[Exchange, ...] = (Exchange("all-reduce", stream, count=2),)
    if kernels.splits_sequence:
        back = 4 if kernels.gathers_again else 2
        kinds = Exchange("gather", stream, count=2, backward_count=back), Exchange("scatter", stream, count=2)
    up, acts, kept_inner = (2, Pass(6 * tokens * inner, 10 * tokens * inner), 6) if shape.gated else (
        1, Pass(4 * tokens * inner, 6 * tokens * inner), 4
    )  # fmt: skip
    parameters = hidden * (2 * heads + 2 * kv_heads + (up + 1) * inner)
    layer = Block(
        (
            Pass(2 * 4 * own, 2 * 8 * own),  # norms
            Product(tokens, heads + 2 * kv_heads, hidden),
            *_attention(shape, share, kernels),
            Product(tokens, hidden, heads),
            Product(tokens, up * inner, hidden),
            acts,
            Product(tokens, hidden, inner, again={"stopped": 0.0}),
            Pass(2 * 7 * own, 2 * 5 * own) if kernels.dropout else Pass(2 * 6 * own, 2 * 2 * own),  # and the residual
            *kinds,
        ),
        parameters,
        _kept(shape, share, kernels, own, kept_inner * tokens * inner),
        4 * tokens * inner + 2 * stream,
    )
    table = hidden * shape.vocabulary / tp
    logits = tokens * shape.vocabulary / tp
    of_loss = Pass(10 * logits, 8 * logits) if kernels.fused_loss else Pass(38 * logits, 14 * logits)
    ends = Block(
        (Product(tokens, shape.vocabulary / tp, hidden, in_float8=False), of_loss),
        table,
        {"none": 2 * logits + 2 * stream, "output": 2 * logits},
    )
    tables = (1 if shape.tied else 2) * table
    return Work(layer, shape.num_layers, ends, stream / tp, shape.num_layers * parameters + tables, table)


def _attention(shape: Shape, share: Share, kernels: Kernels) -> tuple[Operation, ...]:
    heads, count = shape.heads * shape.head_size / share.tp, share.sequences * shape.heads / share.tp
    if kernels.fused_attention:
        turned = 2 * share.tokens * (shape.heads + shape.kv_heads) * shape.head_size / share.tp
        others = 2 * share.tokens * share.cp * 2 * shape.kv_heads * shape.head_size / share.tp
        return (
            *((Pass(2 * turned, 2 * turned),) if shape.gated else ()),  # rotation
            Attention(2 * share.tokens * share.seq_len * heads, again=_ATTENTION),
            Exchange("gather", others, axis="cp"),
        )
    length, scores = share.seq_len, count * share.seq_len * share.seq_len
    return (
        Product(length, length, shape.head_size, count, again=_ATTENTION, in_float8=False),
        Pass(4 * scores, 6 * scores, again=_ATTENTION),  # softmax
        *((Pass(5 * scores, 5 * scores, again=_ATTENTION),) if kernels.dropout else ()),  # with its mask
        Product(length, shape.head_size, length, count, again=_ATTENTION, in_float8=False),
    )


def _kept(shape: Shape, share: Share, kernels: Kernels, own: Number, of_inner: Number) -> dict[str, Number]:
    """Bytes of a layer that wait for backward, as arXiv 2205.05198 counts them."""
    split = 2 * share.tokens * (2 * shape.heads + 2 * shape.kv_heads) * shape.head_size / share.tp + of_inner
    without = (10 if kernels.dropout else 8) * own + split
    if kernels.fused_attention:
        scores = 4 * share.tokens * shape.heads / share.tp
    else:
        scores = (5 if kernels.dropout else 2) * share.sequences * shape.heads / share.tp * share.seq_len**2
    return {"none": without + scores, "attention": without, "full": 2 * own}
