"""Times the parts of a step on one GPU as a run computes them, beside other ways to compute them, in one table.

    python -m benchmarks.recipe.candidates          in the sizes of Llama 3 8B, on the first GPU
    python -m benchmarks.recipe.candidates --tiny   also on a CPU: whether all of them run

The first way of each part is the run's. The ways take turns: two turns compile and warm up, the best of six counts.
"least" is the work at what an H200 reached: 4.2 TB/s, 770 TFLOP/s, 1,540 in float8. "GiB" is a call's peak.
"""

import argparse
import itertools
import math
import timeit
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed.fsdp  # its operators
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend

from torchtitan.config.schema import Compile, Optimizer
from torchtitan.parallel.collectives import squares_at_once
from torchtitan.parallel.gpu_attention import Case, attention_by, installed, trial
from torchtitan.training.loss import build_loss
from torchtitan.training.optimizer.apply import apply_update
from torchtitan.training.optimizer.build import build_optimizer

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
BFLOAT16, FLOAT32 = torch.bfloat16, torch.float32
BYTES, FLOPS, FLOAT8_FLOPS = 4.2e12, 770e12, 1540e12  # a second
SIZES = "dim", "hidden", "heads", "kv_heads", "head_dim", "vocabulary", "tokens", "compiler"
LLAMA_8B, TINY = (4096, 14336, 32, 8, 128, 128256, 8192, "inductor"), (64, 96, 4, 2, 16, 256, 128, "eager")
Ways = dict[str, Callable[[], Any]]
Part = tuple[str, float, float, Ways, Ways]  # its title, its bytes or FLOPs, how many a second, ways, their contexts


def drawn(*size: int, dtype: torch.dtype = BFLOAT16) -> Tensor:
    return torch.randn(*size, device=DEVICE, dtype=dtype)


def block(of: SimpleNamespace, dtype: torch.dtype) -> tuple[list[Tensor], list[int]]:
    """Tensors like a block's parameters, which FSDP takes together, and how many numbers each holds."""
    dim, kv, hidden = of.dim, of.kv_heads * of.head_dim, of.hidden
    shapes = [(dim, dim), (kv, dim), (kv, dim), (dim, dim), (hidden, dim), (hidden, dim), (dim, hidden), (dim,), (dim,)]
    tensors = [drawn(*shape, dtype=dtype) for shape in shapes]
    return tensors, [tensor.numel() for tensor in tensors]


def gradients(of: SimpleNamespace) -> Iterator[Part]:
    given, numbers = block(of, BFLOAT16)
    flat = torch.empty(sum(numbers), device=DEVICE)
    sums = [part.view_as(tensor) for part, tensor in zip(flat.split(numbers), given, strict=True)]
    ways = {
        "a cast each": lambda: [tensor.float() for tensor in given],
        "one _foreach_copy_": lambda: torch._foreach_copy_(sums, given),
        "FSDP's chunk_cat": lambda: torch.ops.fsdp.chunk_cat(given, dim=0, num_chunks=1, out=flat.view(1, -1)),
    }
    yield "a block's gradients to float32", 6 * len(flat), BYTES, ways, {}
    norms = {
        "ours": lambda: torch.stack(squares_at_once(sums)).sum(),
        "compiled": torch.compile(lambda: sum(tensor.square().sum() for tensor in sums), backend=of.compiler),
        "one vector_norm": lambda: torch.linalg.vector_norm(flat),
    }
    yield "their norm", 4 * len(flat), BYTES, norms, {}


def weights(of: SimpleNamespace) -> Iterator[Part]:
    given, numbers = block(of, FLOAT32)
    rows, total = [tensor.view(-1) for tensor in given], sum(numbers)
    first, second, third = (torch.empty(total, device=DEVICE, dtype=BFLOAT16) for _ in range(3))
    outs = [part.view(1, -1) for part in third.split(numbers)]
    fsdp = [
        lambda: torch._foreach_copy_(first.split(numbers), rows),
        lambda: torch.ops.fsdp.all_gather_copy_in(list(first.split(numbers)), second, numbers, total, 0),
        lambda: torch.ops.fsdp.split_with_sizes_copy(second.view(1, -1), numbers, dim=1, out=outs),
    ]
    ways = {"a cast each": lambda: [row.to(BFLOAT16) for row in rows], "one _foreach_copy_": fsdp[0]}
    ways |= {"FSDP's cast, copies in and out": lambda: [step() for step in fsdp]}
    yield "a block's weights to bfloat16", 6 * total, BYTES, ways, {}


def adamw(of: SimpleNamespace) -> Iterator[Part]:
    ours, compiles = Optimizer(moments_dtype="bfloat16"), Compile(enable=True, backend=of.compiler)
    kinds = [
        ("moments and gradients in bfloat16", ours, FLOAT32, BFLOAT16, 18),  # on one rank
        ("moments in bfloat16", ours, FLOAT32, FLOAT32, 20),
        ("torch's, all in float32", Optimizer(), FLOAT32, FLOAT32, 28),
        ("all in bfloat16", ours, BFLOAT16, BFLOAT16, 14),
    ]
    for title, config, dtype, gradient_dtype, num_bytes in kinds:
        torch.compiler.reset()  # a process compiles the update for eight shapes and types at most
        tensors, numbers = block(of, dtype)
        optimizer = build_optimizer([(str(n), nn.Parameter(t)) for n, t in enumerate(tensors)], config, compiles)
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad_dtype = gradient_dtype
        sums = [tensor.to(gradient_dtype, copy=True) for tensor in tensors]
        way = partial(update, optimizer, sums, torch.ones((), device=DEVICE))
        yield f"a block's AdamW, {title}", num_bytes * sum(numbers), BYTES, {"as a run": way}, {}


def update(optimizer: Any, sums: list[Tensor], norm: Tensor) -> None:
    for parameter, gradient in zip(optimizer.param_groups[0]["params"], sums, strict=True):
        parameter.grad = gradient
    apply_update(optimizer, 1e-5, norm)


def attention(of: SimpleNamespace) -> Iterator[Part]:
    within: Ways = {"as a CPU": nullcontext}
    if ON_GPU:
        flash, packages = [SDPBackend.FLASH_ATTENTION], ["", *installed(torch.cuda.get_device_capability()[0])]
        within = {"cuDNN": partial(attention_by, [SDPBackend.CUDNN_ATTENTION])}
        within |= {f"FlashAttention {name[2:] or 2}": partial(attention_by, flash, name) for name in packages}
    shape = (DEVICE, BFLOAT16, of.heads, of.kv_heads, of.head_dim, of.tokens)
    work = 7 * of.tokens**2 * of.heads * of.head_dim  # two products forward, five backward, of the half that is seen
    yield "attention, with backward", work, FLOPS, dict.fromkeys(within, trial(Case(*shape, False))), within
    if within.pop("cuDNN", None):
        yield "the same of 4 documents", 0.3 * work, FLOPS, dict.fromkeys(within, trial(Case(*shape, True))), within


def output(of: SimpleNamespace) -> Iterator[Part]:
    x, weight = drawn(of.tokens, of.dim), drawn(of.vocabulary, of.dim).requires_grad_()
    labels = torch.randint(of.vocabulary, (of.tokens,), device=DEVICE)
    loss = build_loss(Compile(enable=True, backend=of.compiler))

    def ours(chunks: int) -> None:
        for rows, wanted in zip(x.chunk(chunks), labels.chunk(chunks), strict=True):
            loss(F.linear(rows.detach().requires_grad_(), weight)[None], wanted[None]).backward()
        weight.grad = None

    def torchs() -> None:
        rows, options = x.detach().requires_grad_(), nn.LinearCrossEntropyOptions()
        F.linear_cross_entropy(rows, weight, labels, reduction="sum", options=options).backward()
        weight.grad = None

    ways: Ways = {f"ours, in chunks: {chunks}": partial(ours, chunks) for chunks in (1, 2, 4, 8)}
    ways |= {"F.linear_cross_entropy": torchs} if hasattr(F, "linear_cross_entropy") else {}  # from torch 2.13 on
    yield "output and loss, with backward", 6 * x.numel() * of.vocabulary, FLOPS, ways, {}


def float8(of: SimpleNamespace) -> Iterator[Part]:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    plain = nn.Linear(of.dim, of.hidden, bias=False, device=DEVICE, dtype=BFLOAT16)
    layer = convert_to_float8_training(plain, config=Float8LinearConfig(emulate=not ON_GPU))  # one scale a tensor
    x, gradient = drawn(of.tokens, of.dim).requires_grad_(), drawn(of.tokens, of.hidden)

    def both(compute: nn.Module) -> None:
        torch.autograd.grad(compute(x), [x, *compute.parameters()], gradient)

    ways: Ways = {"casts and products": partial(both, torch.compile(layer, backend=of.compiler))}
    if ON_GPU:
        x8, w8, g8 = (tensor.detach().to(torch.float8_e4m3fn) for tensor in (x, plain.weight, gradient))
        pairs = [(x8, w8), (g8, w8.t().contiguous()), (g8.t().contiguous(), x8.t().contiguous())]
        options = {"scale_a": torch.ones((), device=DEVICE), "scale_b": torch.ones((), device=DEVICE)}
        ways["products alone"] = lambda: [torch._scaled_mm(a, b.t(), **options, out_dtype=BFLOAT16) for a, b in pairs]
    ways["in bfloat16"] = partial(both, plain)
    yield "a layer in float8, with backward", 6 * x.numel() * of.hidden, FLOAT8_FLOPS, ways, {}


def milliseconds(way: Callable[[], Any], calls: int = 4) -> float:
    if not ON_GPU:
        return timeit.timeit(way, number=1) * 1000
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    [way() for _ in range(calls)]
    last.record()
    last.synchronize()
    return first.elapsed_time(last) / calls


def lines(title: str, work: float, a_second: float, ways: Ways, within: Ways) -> Iterator[str]:
    best, peaks, failed = dict.fromkeys(ways, math.inf), dict.fromkeys(ways, 0), {}
    for turn, name in itertools.product(range(8), ways):
        before = torch.cuda.memory_allocated() if ON_GPU else 0
        torch.cuda.reset_peak_memory_stats() if ON_GPU else None
        try:
            with within.get(name, nullcontext)():
                took = milliseconds(ways[name]) if name not in failed else math.inf
        except Exception as error:  # the others are still measured
            took, failed[name] = math.inf, f"{type(error).__name__}: {error}".partition("\n")[0]
        best[name] = min(best[name], took) if turn > 1 else math.inf
        peaks[name] = torch.cuda.max_memory_allocated() - before if ON_GPU else 0
    unit, scale = ("GB/s", 1e6) if a_second == BYTES else ("TFLOP/s", 1e9)
    for name, took in best.items():
        shown = f"{took:.3f} | {work / took / scale:,.0f} {unit} | {work / a_second * 1000:.3f}"
        yield f"| {title} | {name} | {failed.get(name, shown)} | {peaks[name] / 2**30:.2f} |"


@torch._dynamo.config.patch(automatic_dynamic_shapes=False)  # a run has one size
def main() -> None:
    parts = {part.__name__: part for part in (gradients, weights, adamw, attention, output, float8)}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=parts, default=list(parts), help="default: all")
    parser.add_argument("--tiny", action="store_true", help="small sizes, and nothing is compiled")
    args = parser.parse_args()
    of = SimpleNamespace(**dict(zip(SIZES, TINY if args.tiny else LLAMA_8B, strict=True)))
    print("| part | way | ms | rate | least ms | GiB |\n| --- | --- | --- | --- | --- | --- |")
    for part in itertools.chain.from_iterable(parts[name](of) for name in args.parts):
        print(*lines(*part), sep="\n", flush=True)


if __name__ == "__main__":
    main()
