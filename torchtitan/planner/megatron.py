"""Published rows of Megatron-LM: a GPT as it computes it, kernel by kernel, without fused attention."""

from collections.abc import Mapping
from typing import Any

from torchtitan.models.operations import Block, Exchange, Pass, Product, Share, Work
from torchtitan.planner.cost import Device, Layout

_ATTENTION = {"attention": 1.0}


def work(row: Mapping[str, Any], seq_len: int, vocabulary: int) -> Work:
    hidden, inner, heads, tp = row["hidden"], row["feedforward"], row["heads"], row["tensor_parallel"]
    share = Share(row["microbatch"], seq_len, tp)
    tokens, is_split = share.tokens, row["sequence_parallel"]
    stream = 2 * tokens * hidden
    own = tokens * hidden / (tp if is_split else 1)  # elements of what lies between the layers
    scores = share.sequences * heads / tp * seq_len * seq_len
    kinds: tuple[Exchange, ...] = (Exchange("all-reduce", stream, count=2),)
    if is_split:
        again = 2 if row["gathers_again_in_backward"] else 0
        kinds = Exchange("gather", stream, count=2, backward_count=2 + again), Exchange("scatter", stream, count=2)
    width, count = hidden // heads, share.sequences * heads / tp
    layer = Block(
        (
            Pass(2 * 4 * own, 2 * 8 * own),  # norms
            Product(tokens, 3 * hidden / tp, hidden),
            Product(seq_len, seq_len, width, count, again=_ATTENTION),
            Pass(4 * scores, 6 * scores, again=_ATTENTION),  # softmax
            Pass(5 * scores, 5 * scores, again=_ATTENTION),  # dropout with its mask
            Product(seq_len, width, seq_len, count, again=_ATTENTION),
            Product(tokens, hidden, hidden / tp),
            Product(tokens, inner / tp, hidden),
            Pass(4 * tokens * inner / tp, 6 * tokens * inner / tp),  # GELU
            Product(tokens, hidden, inner / tp),
            Pass(2 * 7 * own, 2 * 5 * own),  # bias, dropout with its mask, residual addition
            *kinds,
        ),
        (4 * hidden * hidden + 2 * hidden * inner) / tp,
    )
    logits = tokens * vocabulary / tp
    ends = Block((Product(tokens, vocabulary / tp, hidden), Pass(10 * logits, 8 * logits)), 0)
    return Work(layer, row["layers"], ends, stream / tp, row["layers"] * layer.parameters)


def layout(row: Mapping[str, Any]) -> Layout:
    return Layout(
        dp=row["data_parallel"],
        tp=row["tensor_parallel"],
        pp=row["pipeline_parallel"],
        microbatches=row["global_batch"] / row["microbatch"] / row["data_parallel"],
        stages_per_rank=row["stages_per_rank"],
        recompute=row["recompute"],
        shards=False,
        sequence_split=row["sequence_parallel"],
    )


def device(tables: Mapping[str, Any]) -> Device:
    sheet, (inside, between, *_) = tables["device"], tables["network"]
    return Device(
        sheet["matrix_tflops"] * 1e12,
        sheet["memory_gbps"] * 1e9,
        inside["gbytes_per_second"] * 1e9,
        between["gbytes_per_second"] * 1e9,
        inside["devices"],
    )
