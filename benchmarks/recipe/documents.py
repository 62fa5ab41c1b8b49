"""Measures what keeping documents apart costs on a CPU: a step of the 60M model, under a mask of the square or apart.

    python -m benchmarks.recipe.documents apart --dtype float32
    python -m benchmarks.recipe.documents mask --dtype float32

One sequence, one thread, documents of 300 tokens, no optimizer; tokens by the seconds of processor time of the best
step, which other programs change less than the clock's, and the most memory that the process had after the first.
"""

import argparse
import resource
import time
from dataclasses import replace

import torch
import torch.nn.functional as F

from torchtitan.models.decoder.model import Transformer
from torchtitan.models.layers import exchange_attention
from torchtitan.models.llama.args import LLAMA3_FLAVORS
from torchtitan.parallel.documents.attention import DocumentAttention


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("way", choices=("mask", "apart"))
    parser.add_argument("--dtype", default="bfloat16", help="default: %(default)s")
    parser.add_argument("--length", type=int, default=8192, help="tokens of a sequence (default: %(default)s)")
    parser.add_argument("--document", type=int, default=300, help="tokens of a document (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=2, help="default: %(default)s")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Transformer(replace(LLAMA3_FLAVORS["60M"], vocab_size=2048)).to(getattr(torch, args.dtype))
    exchange_attention(model, lambda causal: DocumentAttention(causal, by_mask=args.way == "mask"))
    tokens, labels = torch.randint(2048, (1, args.length)), torch.randint(2048, (args.length,))
    starts = torch.tensor([[*range(0, args.length, args.document), args.length]], dtype=torch.int32)
    seconds, peaks = [], []
    for _ in range(args.steps):
        begin = time.process_time()
        F.cross_entropy(model(tokens, mask=starts)[0].float(), labels).backward()
        seconds.append(time.process_time() - begin)
        peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)
        model.zero_grad()
    print(f"{args.way}, {args.dtype}: {args.length / min(seconds):,.0f} tokens/s, {peaks[0]:.2f} GiB")


if __name__ == "__main__":
    main()
