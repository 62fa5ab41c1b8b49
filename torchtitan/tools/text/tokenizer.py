"""Trains a byte-level BPE tokenizer on your text, and compares it with a known one on text that it has not seen.

python -m torchtitan tokenizer train --data 'corpus/*.jsonl' --vocab_size 32000 --out my-tokenizer
"""

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from torchtitan.data.texts.sharded import ShardedTexts
from torchtitan.data.texts.sources import locate_text, open_texts
from torchtitan.data.tokenizers.tokenizer import Tokenizer, build_tokenizer
from torchtitan.refusal import Refusal
from torchtitan.weights.targets import refuse_existing

_HELD_OUT = 20  # every so many documents one is kept for the comparison
_MOST_HELD_OUT_CHARS = 2_000_000
_LEAST_VOCABULARY = 256 + 2  # every byte, and two control tokens
_CONTROL = ("<|begin_of_text|>", "<|end_of_text|>")
# Words, numbers of up to three digits, punctuation and white space are merged apart from each other.
_SPLIT = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


HELP = "train a byte-level BPE tokenizer on your text"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", required=True, help="the text: a file, a folder or a quoted glob")
    parser.add_argument("--vocab_size", type=int, required=True, help="number of tokens, such as 32000")
    parser.add_argument("--out", required=True, help="the folder to write")
    parser.add_argument("--text_key", default="text", help="the field that holds the text (default: %(default)s)")
    parser.add_argument(
        "--beside", default="tests/assets/tokenizer", help="a tokenizer to compare with (default: %(default)s)"
    )


def run(args: argparse.Namespace, _: Sequence[str]) -> None:
    if args.vocab_size < _LEAST_VOCABULARY:
        raise Refusal(f"--vocab_size {args.vocab_size} is too small; use {_LEAST_VOCABULARY} or more")
    out = refuse_existing(args.out)
    location = locate_text("local text", args.data)
    if location.kind == "prepared":
        raise Refusal(f"--data {args.data} holds tokens; name the text that they were prepared from")
    texts, beside = open_texts(location, args.text_key), build_tokenizer(Path(args.beside))
    begin, held_out = time.perf_counter(), []
    tokenizer, trainer = _new(args.vocab_size)

    def training_texts() -> Iterator[str]:
        kept = 0
        for number, text in enumerate(all_texts(texts)):
            if number % _HELD_OUT == _HELD_OUT - 1 and kept < _MOST_HELD_OUT_CHARS:
                held_out.append(text)
                kept += len(text)
            else:
                yield text

    tokenizer.train_from_iterator(training_texts(), trainer)
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(out / "tokenizer.json"))
    names = dict(zip(("bos_token", "eos_token"), _CONTROL, strict=True))
    (out / "tokenizer_config.json").write_text(json.dumps(names, indent=2) + "\n", encoding="utf-8")
    found = tokenizer.get_vocab_size()
    if found < args.vocab_size:
        print(f"the text gives only {found:,} of {args.vocab_size:,} tokens")
    print(f"{out}: {found:,} tokens, {time.perf_counter() - begin:.0f} s")
    _compare(held_out, {str(out): build_tokenizer(out), args.beside: beside})
    print(f'train with it:  [model] hf_assets_path = "{out}"')


def _new(vocab_size: int) -> tuple:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated")
    bytes_alone = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_alone])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(_CONTROL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=True,
    )
    return tokenizer, trainer


def all_texts(texts: object) -> Iterator[str]:
    if isinstance(texts, ShardedTexts):
        for shard in range(texts.num_shards):
            yield from texts.open(shard, None)
    else:
        yield from (texts.text(index) for index in range(len(texts)))  # type: ignore[attr-defined, arg-type]


def _compare(held_out: list[str], tokenizers: dict[str, Tokenizer]) -> None:
    """Bytes a token on text that was not trained on; more is better."""
    if not held_out:
        print(f"fewer than {_HELD_OUT} documents: none is held out to compare tokenizers on")
        return
    size = sum(len(text.encode()) for text in held_out)
    print(f"\non {len(held_out):,} held-out documents ({size:,} bytes):\n\ntokens     bytes a token  tokenizer")
    for name, tokenizer in tokenizers.items():
        count = sum(len(tokenizer.encode(text, bos=False, eos=False)) for text in held_out)
        print(f"{tokenizer.vocab_size:<10,} {size / count:<14.2f} {name}")
    print()
