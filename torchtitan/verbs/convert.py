"""Weights from one form into another, never in memory as a whole.

python -m torchtitan convert outputs llama-hf            a run's newest checkpoint, for Hugging Face
python -m torchtitan convert outputs llama-hf --push me/mine   and onto the hub
python -m torchtitan convert Llama-3.2-1B imported       a Hugging Face folder or Meta's files, as a checkpoint
"""

import argparse
import math
import time
from pathlib import Path

import torch

from torchtitan.checkpoint.storage import Storage
from torchtitan.hardware import peak_memory_gib
from torchtitan.observe.log import logger, start_logging
from torchtitan.refusal import Refusal
from torchtitan.verbs import push
from torchtitan.verbs.check import describe_model
from torchtitan.weights.checkpoint import save_checkpoint
from torchtitan.weights.stored import StoredModel, build_tokenizer_for, copy_tokenizer, open_model, write_hf
from torchtitan.weights.targets import refuse_existing


def run(args: argparse.Namespace) -> None:
    begin = time.perf_counter()
    if not 0 < args.shard_gb < math.inf:
        raise Refusal(f"--shard_gb {args.shard_gb} is no size; give the gigabytes of a file, such as 5")
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
        if to == "hf":
            write_hf(source, args.target, assets, dtype, int(args.shard_gb * 1e9))
        else:
            write_checkpoint(source, args.target, assets, dtype)
    size = sum(like.numel() * (dtype or like.dtype).itemsize for like in source.weights.outline.values())
    print(
        f"{source.weights.where} -> {args.target}: {len(source.weights.outline)} tensors, {size / 2**30:.2f} GiB in "
        f"{time.perf_counter() - begin:.1f} s, peak memory {peak_memory_gib(torch.device('cpu')):.2f} GiB"
    )
    if args.push:
        print(f"pushed: {push.push(args.push, args.target)}")


def write_checkpoint(source: StoredModel, folder: str, assets: Path, dtype: torch.dtype | None) -> None:
    """A run folder whose only checkpoint is the model, at step 0."""
    refuse_existing(folder)
    build_tokenizer_for(source, assets)
    own_assets = Path(folder) / "tokenizer"
    config = source.plain_config(folder, own_assets)
    copy_tokenizer(source, assets, own_assets)
    save_checkpoint(source.weights, Storage(f"{folder}/checkpoint"), config.model_dump(mode="json"), dtype)
