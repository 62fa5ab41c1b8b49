"""Shows what a run reads: its first documents as the model sees them, with what is learned, and figures of many more.

python -m torchtitan data train_configs/chat_debug.toml
python -m torchtitan data train_configs/chat_debug.toml -- --training.dataset_path chats.jsonl --training.seq_len 512

The sequences are those of a run on one device. What the model learns is bold on a terminal, and elsewhere stands
between << and >>. Tokens of a header, of questions and of padding are inputs alone.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise, starmap
from typing import TYPE_CHECKING, Any

from torchtitan.config.schema import Config
from torchtitan.models.families import load_run_or_exit
from torchtitan.observe.log import wants_color
from torchtitan.refusal import Refusal

if TYPE_CHECKING:
    from torchtitan.data.batch import Batch
    from torchtitan.data.chat.encoder import ChatEncoder
    from torchtitan.data.loader import Loader

HELP = "show what a run reads, which tokens are learned, and what is cut or dropped"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "file", metavar="FILE.toml", nargs="?", help="the configuration (default: --job.config_file after --)"
    )
    parser.add_argument("--examples", type=int, default=3, help="documents to show (default: %(default)s)")
    parser.add_argument(
        "--sequences", type=int, default=200, help="sequences to count, or all of an epoch (default: %(default)s)"
    )
    parser.epilog = "After --: options of train.py."


def run(args: argparse.Namespace, options: Sequence[str]) -> None:
    if args.examples < 0 or args.sequences < 1:
        raise Refusal("--examples is 0 or more, --sequences 1 or more")
    file = ["--job.config_file", args.file] if args.file else []
    config, blueprint = load_run_or_exit([*file, *options], None, rank=0, prog="data")
    if not blueprint.reads_text:
        raise Refusal(f"model.name = {config.model.name!r} brings its own data; look at it with a program of your own")
    from torchtitan.data.tokenizers.tokenizer import build_tokenizer

    tokenizer = build_tokenizer(config.model.hf_assets_path)
    loader, encoders = _open(config, tokenizer)
    batches = _take(loader, args.sequences)
    decode = encoders[0].speller.decode if encoders else tokenizer.decode
    mark = _bold if wants_color(config.metrics.disable_color_printing) and sys.stdout.isatty() else _between
    counts = Counts()
    for batch in batches:
        for ids, learned, num_inputs in _documents(batch):
            if counts.documents < args.examples:
                print(f"--- document {counts.documents + 1}: {len(ids)} tokens, {sum(learned)} learned")
                print(_show(ids, learned, decode, mark))
            counts.documents += 1
            counts.inputs += num_inputs
            counts.learned += sum(learned)
        counts.sequences += len(batch.inputs)
        counts.places += batch.inputs.numel()
    loader.close()
    print("\n".join([f"--- {counts}", *_of_encoders(encoders)]))


@dataclass
class Counts:
    """Of the sequences that were looked at."""

    sequences: int = 0
    documents: int = 0
    inputs: int = 0
    learned: int = 0
    places: int = 0

    def __str__(self) -> str:
        if not self.sequences:
            return "no sequence: the data is shorter than one batch"
        return (
            f"{self.sequences:,} sequences hold {self.documents:,} documents or parts of them, "
            f"{self.documents / self.sequences:.1f} each; of {self.places:,} places {self.learned / self.places:.1%} "
            f"are learned, and {1 - self.inputs / self.places:.1%} are empty"
        )


def _open(config: Config, tokenizer: Any) -> "tuple[Loader, list[ChatEncoder]]":
    """The training data as one rank reads it, and the encoders of its conversations."""
    import torch

    from torchtitan.config.layout import plan_batch
    from torchtitan.data.batch import OwnSlots
    from torchtitan.data.cursor import Order
    from torchtitan.data.loader import Loader, open_sources
    from torchtitan.training.data import shape_of, source_of

    training, plan = config.training, plan_batch(config.training, 1)
    given, shape = shape_of(
        config, training.sources or [source_of(training)], training.seq_len, tokenizer, torch.device("cpu"), pads=False
    )
    shape = shape._replace(block_causal=True)  # only to tell documents apart
    layout = OwnSlots(plan.global_batch_size, plan.num_streams, 0, 1)
    sources = open_sources(given, tokenizer, layout, training.epochs, divided=False, pads=False)
    encoders = [source.text_key.encoder for source in given if source.chat is not None]  # type: ignore[attr-defined]
    for encoder in encoders:
        encoder.counts = type(encoder.counts)()  # without what estimated the mean length
    seed = 0 if config.debug.seed is None else config.debug.seed
    return Loader(sources, tokenizer, layout, shape, Order(plan.num_streams, seed, training.shuffle)), encoders


def _take(loader: "Loader", num_sequences: int) -> "Iterator[Batch]":
    found = 0
    while found < num_sequences and (batch := loader.next()) is not None:
        found += len(batch.inputs)
        yield batch


def _documents(batch: "Batch") -> Iterator[tuple[list[int], list[bool], int]]:
    """The documents of a batch: ids, whether each is learned, and how many are inputs. Padding is left out."""
    from torchtitan.models.spec import IGNORED

    assert batch.documents is not None
    for inputs, labels, starts in zip(batch.inputs, batch.labels, batch.documents, strict=True):
        ids, labels = inputs.tolist(), labels.tolist()
        for own in filter(None, starmap(range, pairwise(starts.tolist()))):
            learned = [False, *(labels[place] != IGNORED for place in own[:-1])]
            if own[-1] == len(ids) - 1 and labels[-1] != IGNORED:  # the last label is no input of this sequence
                yield [*(ids[place] for place in own), labels[-1]], [*learned, True], len(own)
            elif any(learned):
                yield [ids[place] for place in own], learned, len(own)


def _show(
    ids: list[int], learned: list[bool], decode: Callable[[Sequence[int]], str], mark: Callable[[str], str]
) -> str:
    parts = []
    for is_learned, group in groupby(range(len(ids)), learned.__getitem__):
        text = decode([ids[place] for place in group])
        parts.append(mark(text) if is_learned else text)
    return "".join(parts)


def _bold(text: str) -> str:
    return f"\033[1;32m{text}\033[0m"


def _between(text: str) -> str:
    return f"<<{text}>>"


def _of_encoders(encoders: "list[ChatEncoder]") -> Iterator[str]:
    for encoder in encoders:
        from torchtitan.data.chat.encoder import describe

        yield f"{encoder.name}: {describe(encoder.counts, encoder.seq_len)}"
        if encoder.counts.straddling:
            yield (
                f"  {encoder.counts.straddling:,} tokens hold the last character of a header and the first of an "
                "answer; they are learned, but a prompt ends in another token: let the header end without white space"
            )
        if encoder.counts.others_open:
            yield (
                f"  {encoder.counts.others_open:,} answers open otherwise than the template's prompt does, and are "
                "learned from where they part from it"
            )
