"""Measures how many tokens a second one process reads: `python -m benchmarks.recipe.loader`.

It times the whole loader, background thread included, on prepared tokens and on JSONL, and `prepare` with 1 and 2
workers.
"""

import argparse
import json
import os
import platform
import tempfile
import time
from pathlib import Path

import numpy as np

from torchtitan.config.schema import DataSource
from torchtitan.data.batch import OwnSlots, Shape
from torchtitan.data.cursor import Order
from torchtitan.data.loader import Loader, open_sources
from torchtitan.data.prepared.prepare import prepare
from torchtitan.data.texts.documents import JsonLines
from torchtitan.data.texts.sources import locate_text
from torchtitan.data.tokenizers.tokenizer import Tokenizer, build_tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokenizer", default="tests/assets/tokenizer", help="folder of the tokenizer")
    parser.add_argument("--seq_len", type=int, default=2048, help="tokens in a sequence (default: %(default)s)")
    parser.add_argument("--global_batch_size", type=int, default=32, help="sequences in a batch (default: %(default)s)")
    parser.add_argument("--document_chars", type=int, default=1600, help="mean length; the default is about 500 tokens")
    parser.add_argument("--num_documents", type=int, default=20_000, help="documents to write (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=5.0, help="how long to time the loader (default: %(default)s)")
    args = parser.parse_args()
    tokenizer = build_tokenizer(args.tokenizer)
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    with tempfile.TemporaryDirectory() as folder:
        text = write_documents(Path(folder) / "text.jsonl", args.num_documents, args.document_chars)
        size = os.path.getsize(text)
        for workers in (1, 2):
            out = str(Path(folder) / f"prepared{workers}")
            start = time.perf_counter()
            meta = prepare("text", text, args.tokenizer, out, workers=workers)
            seconds = time.perf_counter() - start
            print(
                f"prepare, workers {workers}: {meta.num_tokens / seconds / 1e6:.2f} million tokens/s "
                f"({size / seconds / 1e6:.1f} MB/s, {seconds:.1f} s with start-up)"
            )
        mean = meta.num_tokens / meta.num_documents
        print(f"documents: {meta.num_documents:,}, {mean:.0f} tokens on average; seq_len {args.seq_len}")
        for block_causal in (False, True):
            speed = measure(out, tokenizer, args, block_causal)
            print(f"loader, prepared tokens, block_causal {block_causal}: {speed / 1e6:.1f} million tokens/s")
        print(f"loader, JSONL: {measure(text, tokenizer, args, False) / 1e6:.2f} million tokens/s")


def write_documents(path: Path, count: int, chars: int) -> str:
    """Write documents cut from the shipped text, with lengths spread around the mean. Return the file's path."""
    shipped = JsonLines(locate_text("pydocs", None).files, "text")
    text = "\n".join(shipped.text(index) for index in range(len(shipped)))
    random = np.random.default_rng(0)
    with path.open("w") as file:
        for length in random.gamma(2.0, chars / 2, count).astype(int) + 1:
            begin = int(random.integers(len(text) - length))
            file.write(json.dumps({"text": text[begin : begin + length]}) + "\n")
    return str(path)


def measure(path: str, tokenizer: Tokenizer, args: argparse.Namespace, block_causal: bool) -> float:
    source, size = DataSource(dataset="benchmark", dataset_path=path), args.global_batch_size
    layout = OwnSlots(size, size, dp_rank=0, dp_size=1)
    sources = open_sources([source], tokenizer, layout, -1, divided=False, pads=False)
    shape = Shape(args.seq_len, tokenizer.eos_id, block_causal, pin_memory=False, pad_last=False)
    loader = Loader(sources, tokenizer, layout, shape, Order(size, seed=0, shuffle=True))
    for _ in range(5):  # do not count what the loader has read ahead before the clock starts
        loader.next()
    start, num_tokens = time.perf_counter(), 0
    while time.perf_counter() - start < args.seconds:
        batch = loader.next()
        assert batch is not None
        num_tokens += batch.inputs.numel()
    speed = num_tokens / (time.perf_counter() - start)
    loader.close()
    return speed


if __name__ == "__main__":
    main()
