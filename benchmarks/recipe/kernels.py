"""Times this recipe's loss and attention beside torch's own: forward and backward, in ms.

    python -m benchmarks.recipe.kernels

All run in bfloat16 on the first GPU, or on the CPU if there is none. Each is timed once a turn, and its best turn
counts.
"""

import argparse
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from torchtitan.config.schema import Compile
from torchtitan.models.layers import CausalAttention
from torchtitan.parallel.cpu_attention import causal_attention
from torchtitan.parallel.documents.attention import attend
from torchtitan.training.loss import build_loss

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LENGTHS = ((512, 4), (1024, 2), (2048, 1), (4096, 1), (8192, 1))  # sequence length, and number of sequences


def drawn(*size: int) -> Tensor:
    return torch.randn(*size, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)


def milliseconds(compute: Callable[[], Tensor]) -> float:
    """Return how long the computation and its backward take."""
    torch.accelerator.synchronize() if DEVICE.type == "cuda" else None
    begin = time.perf_counter()
    out = compute()
    out.backward(torch.ones_like(out))
    torch.accelerator.synchronize() if DEVICE.type == "cuda" else None
    return (time.perf_counter() - begin) * 1000


def show(title: str, ways: dict[str, Callable[[], Tensor]], turns: int) -> None:
    best = dict.fromkeys(ways, float("inf"))
    for turn in range(turns + 2):
        for name, compute in ways.items():
            best[name] = min(best[name], milliseconds(compute)) if turn > 1 else best[name]
    print(f"| {title} | {' | '.join(f'{best[name]:.1f}' for name in ways)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=8, help="how often each is timed (default: %(default)s)")
    args = parser.parse_args()
    if DEVICE.type == "cpu":
        print("| attention, 8 heads, 4 KV heads | torch's | by products | compiled |\n| --- | --- | --- | --- |")
        kernel, compiled = CausalAttention(), torch.compile(causal_attention, dynamic=False)
        for length, batch in LENGTHS:
            q, k, v = drawn(batch, length, 8, 64), drawn(batch, length, 4, 64), drawn(batch, length, 4, 64)
            ways = {
                "kernel": lambda q=q, k=k, v=v: kernel(q, k, v, None),
                "ours": lambda q=q, k=k, v=v: causal_attention(q, k, v),
                "compiled": lambda q=q, k=k, v=v: compiled(q, k, v),
            }
            show(f"{batch} x {length}", ways, args.turns)
        print()
    print("| documents of 300 tokens, 8 heads, 4 KV heads | under a mask | apart |\n| --- | --- | --- |")
    for length in (2048, 8192):
        q, k, v = drawn(1, length, 8, 64), drawn(1, length, 4, 64), drawn(1, length, 4, 64)
        starts = torch.tensor([[*range(0, length, 300), length]], dtype=torch.int32, device=DEVICE)
        ways = {
            "mask": lambda q=q, k=k, v=v, starts=starts: attend(q, k, v, starts, CausalAttention()),
            "apart": lambda q=q, k=k, v=v, starts=starts: attend(q, k, v, starts, None),
        }
        show(f"1 x {length}", ways, 1 if DEVICE.type == "cpu" else args.turns)
    print()
    print("| loss of 2048 x 32000 logits | torch's | ours | compiled |\n| --- | --- | --- | --- |")
    logits, labels = drawn(1, 2048, 32000), torch.randint(32000, (1, 2048), device=DEVICE)
    ours, compiled_loss = build_loss(Compile()), build_loss(Compile(enable=True))
    ways = {
        # All three copy the logits each time, because backward overwrites them.
        "torch": lambda: F.cross_entropy(logits.clone()[0].float(), labels[0], reduction="sum"),
        "ours": lambda: ours(logits.clone(), labels),
        "compiled": lambda: compiled_loss(logits.clone(), labels),
    }
    show("forward and backward", ways, args.turns)


if __name__ == "__main__":
    main()
