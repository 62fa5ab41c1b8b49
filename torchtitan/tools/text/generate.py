"""Continues a text with stored weights.

python -m torchtitan generate --checkpoint outputs --prompt "The module"
python -m torchtitan generate                                 type line after line; the model continues the whole text
python -m torchtitan generate --chat                          talk with a model that learned conversations
python -m torchtitan generate --prompts in.jsonl --out out.jsonl --temperature 0
torchrun --nproc_per_node 2 -m torchtitan generate ...        the same with tensor parallelism
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from torchtitan.hardware import read_place
from torchtitan.models.describe import describe_model
from torchtitan.observe.log import logger, start_logging
from torchtitan.refusal import Refusal

HELP = "continue a text; under torchrun, with tensor parallelism"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    stored = "a run folder (its newest checkpoint), a folder step-N, or a download from Hugging Face or Meta"
    parser.add_argument("--checkpoint", default="outputs", help=f"{stored} (default: %(default)s)")
    prompt = "one text, shown as it grows, or several at once (default: what you type, line after line)"
    parser.add_argument("--prompt", nargs="+", help=prompt)
    many = 'a file with a line of JSON for each prompt: a text, {"prompt": ...} or {"messages": [...]}'
    parser.add_argument("--prompts", metavar="FILE", help=many)
    out = 'with --prompts: the file for the answers, {"prompt": ..., "answer": ..., "ended": true} in each line'
    parser.add_argument("--out", metavar="FILE", help=out)
    chat = "take prompts and lines for a user's messages, by the chat template; an answer ends at its end mark"
    parser.add_argument("--chat", action="store_true", help=chat)
    parser.add_argument("--system", help="with --chat: the system message that opens the conversation")
    parser.add_argument("--max_new_tokens", type=int, default=100, help="most tokens to add (default: %(default)s)")
    temperature = "0 takes the likeliest token, with which a small model soon repeats itself (default: %(default)s)"
    parser.add_argument("--temperature", type=float, default=0.8, help=temperature)
    parser.add_argument("--top_k", type=int, default=0, help="draw from the k likeliest; 0: from all (default)")
    parser.add_argument("--top_p", type=float, default=1.0, help="draw from the likeliest that make up this share")
    parser.add_argument("--seed", type=int, help="the same one draws the same text (default: a new one each time)")
    dtypes, computed = ("float32", "bfloat16", "float16"), "what to compute in (default: as trained, or as downloaded)"
    parser.add_argument("--dtype", choices=dtypes, help=computed)
    assets = "file or folder (default: model.hf_assets_path of the run, or the downloaded folder)"
    parser.add_argument("--tokenizer", help=assets)
    family = "family of a download whose config.json names none of this recipe's: path/to/file.py:SPEC"
    parser.add_argument("--model", help=family)


def run(args: argparse.Namespace, _: Sequence[str]) -> None:
    place = read_place()
    if not (args.temperature == 0 or 0.01 <= args.temperature <= 100):
        raise Refusal(f"--temperature {args.temperature} is out of range; use 0 for the likeliest, or 0.01 to 100")
    if args.prompt is None and args.prompts is None and place.world_size > 1:
        raise Refusal("a conversation needs a single process; give --prompt, or start without torchrun")
    if (args.prompts is None) != (args.out is None) or (args.prompts and args.prompt):
        raise Refusal("--prompts FILE and --out FILE belong together, without --prompt; give both, or neither")
    if args.top_k < 0 or not 0 < args.top_p <= 1 or args.max_new_tokens < 1:
        raise Refusal("--top_k is 0 or more, --top_p above 0 to 1, --max_new_tokens 1 or more")
    if args.system is not None and not args.chat:
        raise Refusal("--system opens a conversation; give --chat, too")
    import torch

    from torchtitan.tools.text.writer import Writer, build_model, check_tensor_parallel, converse
    from torchtitan.training.assemble import start_run
    from torchtitan.weights.stored import open_model

    start_logging(place.rank)
    prompts = None
    if args.prompts is not None:
        from torchtitan.tools.text.many import answer_file, read_prompts

        prompts = read_prompts(args.prompts, args.chat)
    source = open_model(args.checkpoint, args.model)
    logger.info(f"reading {source.weights.where}: {describe_model(source.blueprint, str(source.dtype)[6:])}")
    config = source.plain_config(args.checkpoint, args.tokenizer or source.assets, degree=place.world_size)
    check_tensor_parallel(source.blueprint, config)
    with start_run(config, source.blueprint, place) as run:
        assert run.tokenizer is not None
        axis = run.mesh.devices["tp"] if run.dims.tp > 1 else None
        model = build_model(source, getattr(torch, args.dtype) if args.dtype else source.dtype, run.device, axis)
        writer = Writer(model, run.tokenizer, source, args, shows=place.rank == 0)
        template = None if source.config is None else source.config.model.chat_template
        talking = config.model.model_copy(update={"chat_template": template})
        if prompts is not None:
            answer_file(writer, prompts, Path(args.out), talking if args.chat else None, args.system)
        elif args.chat:
            from torchtitan.tools.text.chat import Chat, answer_all, talk

            chat = Chat(writer, talking, args.system)
            talk(chat, sys.stdin) if args.prompt is None else answer_all(chat, args.prompt)
        elif args.prompt is None:
            converse(writer, sys.stdin)
        else:
            writer.write(args.prompt)
