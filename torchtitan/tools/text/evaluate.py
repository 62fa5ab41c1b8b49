"""Loss and perplexity of stored weights on the data of [validation], or their scores in tasks that others use, too.

python -m torchtitan eval --checkpoint outputs -- --validation.dataset_path held_out.jsonl
python -m torchtitan eval --checkpoint outputs --tasks arc_easy,hellaswag        by lm-evaluation-harness
torchrun --nproc_per_node 2 -m torchtitan eval ...                               on several devices
"""

import argparse
import math
from collections.abc import Sequence

from torchtitan.hardware import read_place
from torchtitan.models.describe import describe_model
from torchtitan.observe.log import logger, start_logging
from torchtitan.refusal import Refusal

HELP = "measure loss and perplexity of stored weights on the data of [validation], or their scores in tasks"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    stored = "a run folder (its newest checkpoint), a folder step-N, or a download from Hugging Face or Meta"
    parser.add_argument("--checkpoint", required=True, help=stored)
    family = "family of a download whose config.json names none of this recipe's: path/to/file.py:SPEC"
    parser.add_argument("--model", help=family)
    tasks = "tasks of lm-evaluation-harness (pip install lm-eval), by name or as YAML files, with commas between"
    parser.add_argument("--tasks", help=tasks)
    parser.add_argument("--chat", action="store_true", help="with --tasks: ask by the chat template")
    shots = "with --tasks: examples in each prompt (default: as each task says)"
    parser.add_argument("--num_fewshot", type=int, help=shots)
    limit = "with --tasks: documents of each task (default: all); fewer give no score to report"
    parser.add_argument("--limit", type=int, help=limit)
    out = "with --tasks: file for the results (default: a new one in scores/ of the run folder)"
    parser.add_argument("--out", help=out)
    parser.epilog = "After --: options of train.py, over the configuration that the checkpoint was trained with."


def run(args: argparse.Namespace, options: Sequence[str]) -> None:
    place = read_place()
    others = {"--chat": args.chat, "--num_fewshot": args.num_fewshot, "--limit": args.limit, "--out": args.out}
    if args.tasks is None and (given := [name for name, value in others.items() if value not in (None, False)]):
        raise Refusal(f"{given[0]} is for tasks; give --tasks, too")
    if (args.num_fewshot or 0) < 0 or (args.limit is not None and args.limit < 1):
        raise Refusal("--num_fewshot is 0 or more, --limit 1 or more")
    from torchtitan.tools.text.perplexity import evaluate, resolve
    from torchtitan.training.data import holds_out
    from torchtitan.weights.stored import open_model

    start_logging(place.rank)
    source = open_model(args.checkpoint, args.model)
    logger.info(f"reading {source.weights.where}: {describe_model(source.blueprint, str(source.dtype)[6:])}")
    config, blueprint = resolve(source, options, place, for_tasks=args.tasks is not None)
    if args.tasks is not None:
        from torchtitan.tools.text.tasks import answer_tasks

        answer_tasks(args, source, config, blueprint, place)
        return
    loss, tokens = evaluate(source, config, blueprint, place)
    if place.rank == 0:
        data = config.validation.dataset_path or config.validation.dataset
        if holds_out(config):
            data = f"the held-out documents of {config.training.dataset_path}"
        print(f"{source.weights.where} on {data}: loss {loss:.6f}, perplexity {math.exp(loss):.4f}, {tokens:,} tokens")
