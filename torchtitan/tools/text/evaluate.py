"""Loss and perplexity of stored weights on the data of [validation].

python -m torchtitan eval --checkpoint outputs -- --validation.dataset_path held_out.jsonl
"""

import argparse
import math
from collections.abc import Sequence

from torchtitan.hardware import read_place
from torchtitan.models.describe import describe_model
from torchtitan.observe.log import logger, start_logging

HELP = "measure loss and perplexity of stored weights on the data of [validation]"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    stored = "a run folder (its newest checkpoint), a folder step-N, or a download from Hugging Face or Meta"
    parser.add_argument("--checkpoint", required=True, help=stored)
    family = "family of a download whose config.json names none of this recipe's: path/to/file.py:SPEC"
    parser.add_argument("--model", help=family)
    parser.epilog = "After --: options of train.py, over the configuration that the checkpoint was trained with."


def run(args: argparse.Namespace, options: Sequence[str]) -> None:
    place = read_place()
    from torchtitan.tools.text.perplexity import evaluate, resolve
    from torchtitan.training.data import holds_out
    from torchtitan.weights.stored import open_model

    start_logging(place.rank)
    source = open_model(args.checkpoint, args.model)
    logger.info(f"reading {source.weights.where}: {describe_model(source.blueprint, str(source.dtype)[6:])}")
    config, blueprint = resolve(source, options, place)
    loss, tokens = evaluate(source, config, blueprint, place)
    if place.rank == 0:
        data = config.validation.dataset_path or config.validation.dataset
        if holds_out(config):
            data = f"the held-out documents of {config.training.dataset_path}"
        print(f"{source.weights.where} on {data}: loss {loss:.6f}, perplexity {math.exp(loss):.4f}, {tokens:,} tokens")
