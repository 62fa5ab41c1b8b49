"""What a decoder with experts computes, keeps and sends, for the planner, which takes their load as even; no torch."""

from torchtitan.models.decoder.work import attention, whole
from torchtitan.models.experts.args import ExpertArgs
from torchtitan.models.operations import Block, Exchange, Number, Pass, Product, Share, Work
from torchtitan.refusal import Refusal

_BY_OPERATION = {"selective op": 1.0}  # of a mixture, it keeps products, and the rows that travelled


def operations(args: ExpertArgs, share: Share) -> Work:
    if args.num_dense_layers:
        raise Refusal(
            f"the shape has num_dense_layers = {args.num_dense_layers}, and the planner predicts models whose layers "
            "are alike; use dry_run for the memory of a layout, and compare for the speed of two"
        )
    dim, hidden, tp, tokens = args.dim, args.hidden_dim, share.tp, share.tokens
    heads, kv_heads = args.n_heads * args.head_size, args.n_kv_heads * args.head_size
    own = tokens / tp  # tokens that this rank routes
    rows, here = own * args.experts_per_token, args.num_experts / share.ep
    each = rows / here  # rows of an expert
    stream, travels, width = 2 * tokens * dim, 2 * rows * dim, args.num_shared_experts * hidden / tp
    shared = (
        Product(tokens, width, dim, count=2, again={"selective op": 0.5}),
        Pass(6 * tokens * width, 10 * tokens * width, again=_BY_OPERATION),
        Product(tokens, dim, width, again={"selective op": 0.5}),
        Exchange("scatter", stream),
    )
    replicated = 2 * dim + 2 * args.head_size * args.head_norms + args.num_experts * dim
    layer = Block(
        (
            *attention(args, share, gathers=2 if args.num_shared_experts else 1),
            Product(own, args.num_experts, dim, in_float8=False),
            Exchange("all-to-all", 4 * args.num_experts, backward_count=0, axis="ep"),  # how many rows travel
            Exchange("all-to-all", travels, count=2, axis="ep"),
            # Rows are spread, sorted by expert, sorted back, collected, and summed.
            Pass(11 * travels, 12 * travels, fuses=False, again=_BY_OPERATION),
            Product(each, hidden, dim, count=2 * here, in_float8=False),
            Pass(6 * rows * hidden, 10 * rows * hidden, again=_BY_OPERATION),  # SwiGLU
            Product(each, dim, hidden, count=here, in_float8=False),
            *(shared if args.num_shared_experts else ()),
        ),
        2 * dim * (heads + kv_heads) / tp + replicated + 3 * dim * width,
        _kept(args, share),
        replicated,
        _working(args, share),
        3 * here * dim * hidden,
    )
    return whole(args, share, layer)


def _of_mixture(args: ExpertArgs, share: Share) -> Number:
    """Bytes of a mixture that wait for backward."""
    own = share.tokens / share.tp
    rows = own * args.experts_per_token
    return own * 4 * (args.dim + args.num_experts) + rows * (4 * args.dim + 8 * args.hidden_dim + 32)


def _kept(args: ExpertArgs, share: Share) -> dict[str, Number]:
    tokens, tp, stream = share.tokens, share.tp, 2 * share.tokens * args.dim
    heads, kv_heads = args.n_heads * args.head_size / tp, args.n_kv_heads * args.head_size / tp
    own, width = tokens / tp, args.num_shared_experts * args.hidden_dim / tp
    rows, row = own * args.experts_per_token, 4 * tokens * args.n_heads / tp
    of_shared = (stream + 8 * tokens * width) * (args.num_shared_experts > 0)
    many = 2 * stream / tp + stream + 4 * tokens * (heads + kv_heads) + row + 8 * tokens / tp
    many = many + (4 * tokens * share.cp * heads * (1 + 0.5 / share.cp) + tokens * heads) * (share.cp > 1)
    if args.head_norms:
        many = many + 2 * tokens * (heads + kv_heads) + row * (1 + args.n_kv_heads / args.n_heads)
    half = stream / tp + 2 * tokens * (2 * heads + kv_heads + width) + row + stream / tp * (tp > 1)
    travelled = 4 * args.dim * (share.ep > 1)  # there and back
    half = half + own * 4 * args.num_experts + rows * (2 * args.dim + travelled + 4 * args.hidden_dim + 12)
    return {"none": many + of_shared + _of_mixture(args, share), "selective op": half, "full": stream / tp, "fused": 0}


def _working(args: ExpertArgs, share: Share) -> dict[str, list[tuple[Number, Number]]]:
    """With all rows of a mixture, with all gradients of its experts, and with all of a layer's."""
    tp, stream = share.tp, 2 * share.tokens * args.dim
    part, rows = stream / tp, share.tokens / tp * args.experts_per_token
    experts = 3 * args.num_experts / share.ep * args.dim * args.hidden_dim
    heads = 2 * args.dim * (args.n_heads + args.n_kv_heads) * args.head_size / tp
    first = 4 * rows * args.dim + 2 * part, 0
    # A scatter reads four bytes a parameter, and the gathered weights are gone by then.
    second = 4 * rows * args.dim + 2 * part - _of_mixture(args, share), 2 * experts
    third = 3 * stream + 3 * part - _kept(args, share)["none"], heads + experts
    return {"none": [first, second, third], "again": [first, second, third]}
