"""Weights from one form into another, never in memory as a whole.

python -m torchtitan convert outputs llama-hf            a run's newest checkpoint, for Hugging Face
python -m torchtitan convert outputs llama-hf --push me/mine   and onto the hub
python -m torchtitan convert outputs adapter             a run with [lora]: the adapter, for peft; --merge: the model
python -m torchtitan convert Llama-3.2-1B imported       a Hugging Face folder or Meta's files, as a checkpoint
"""

import argparse
import math
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from torchtitan.hardware import peak_memory_gib
from torchtitan.models.describe import describe_model
from torchtitan.observe.log import logger, start_logging
from torchtitan.refusal import Refusal
from torchtitan.tools.hub import push

HELP = "turn weights into and from Hugging Face's form, and from Meta's files"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    stored = "a run folder (its newest checkpoint), a folder step-N, or a download from Hugging Face or Meta"
    parser.add_argument("source", metavar="FROM", help=stored)
    parser.add_argument("target", metavar="TO", help="the folder to write, new or empty")
    parser.add_argument(
        "--to", choices=("hf", "torchtitan"), help="form of TO (default: hf for a run, else torchtitan)"
    )
    merge = "of a run with [lora], write the model with the adapter merged in, instead of the adapter"
    parser.add_argument("--merge", action="store_true", help=merge)
    dtypes = ("float32", "bfloat16", "float16")
    parser.add_argument("--dtype", choices=dtypes, help="type of the weights in TO (default: that of FROM)")
    parser.add_argument("--shard_gb", type=float, default=5, help="GB of a safetensors file (default: %(default)s)")
    parser.add_argument("--push", metavar="OWNER/NAME", help="then put TO on the hub; a new repository is private")
    assets = "file or folder (default: model.hf_assets_path of the run, or the downloaded folder)"
    parser.add_argument("--tokenizer", help=assets)
    family = "family of a download whose config.json names none of this recipe's: path/to/file.py:SPEC"
    parser.add_argument("--model", help=family)


def run(args: argparse.Namespace, _: Sequence[str]) -> None:
    begin = time.perf_counter()
    if not 0 < args.shard_gb < math.inf:
        raise Refusal(f"--shard_gb {args.shard_gb} is no size; give the gigabytes of a file, such as 5")
    import torch

    from torchtitan.weights.stored import open_model, write_checkpoint, write_hf
    from torchtitan.weights.targets import refuse_existing

    start_logging()
    source = open_model(args.source, args.model)
    logger.info(f"reading {source.weights.where}: {describe_model(source.blueprint, str(source.dtype)[6:])}")
    dtype = getattr(torch, args.dtype) if args.dtype else None
    assets = Path(args.tokenizer) if args.tokenizer else source.assets
    with source.reading():
        if source.place is not None:
            storage, manifest = source.place
            if faults := storage.faults(manifest, manifest.files):
                raise Refusal(f"{source.weights.where} is damaged: {'; '.join(faults)}; convert another step")
        to = args.to or ("torchtitan" if source.config is None else "hf")
        if args.push:
            if to != "hf":
                raise Refusal(f"--push needs Hugging Face's form, but TO will have the form {to}; add --to hf")
            refuse_existing(args.target)
            push.make_repository(args.push)
        if args.merge and (source.adapter is None or to != "hf"):
            raise Refusal(
                f"--merge: {source.weights.where} has no adapter, or TO not Hugging Face's form; remove --merge"
            )
        template = source.config.model.chat_template if source.config is not None and to == "hf" else None
        if template is not None and not Path(template).is_file():
            raise Refusal(f"model.chat_template = {template} of this run is not here; bring it, or start where it lies")
        written, proof = source.weights.outline, ""
        if source.adapter is not None and to == "hf":
            from torchtitan.tools.hub.adapter import export_adapter, export_merged

            if args.merge:
                proof = export_merged(source, args.target, assets, dtype, int(args.shard_gb * 1e9))
            else:
                written = source.adapter.weights.outline
                proof = export_adapter(source, args.target, dtype)
                if template is not None:
                    shutil.copyfile(template, Path(args.target) / "chat_template.jinja")
        elif to == "hf":
            write_hf(source, args.target, assets, dtype, int(args.shard_gb * 1e9))
        else:
            write_checkpoint(source, args.target, assets, dtype)
    size = sum(like.numel() * (dtype or like.dtype).itemsize for like in written.values())
    print(
        f"{source.weights.where} -> {args.target}: {len(written)} tensors, {size / 2**30:.2f} GiB in "
        f"{time.perf_counter() - begin:.1f} s, peak memory {peak_memory_gib(torch.device('cpu')):.2f} GiB"
    )
    if proof:
        print(proof)
    if args.push:
        print(f"pushed: {push.push(args.push, args.target)}")
