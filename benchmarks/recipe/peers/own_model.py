"""Compares training a model of transformers, a BERT with a head, here and with Hugging Face's Trainer, in turn.

    python -m benchmarks.recipe.peers.own_model --repeats 3

Module, samples, batch, type, and AdamW's settings are the same. The table shows medians over the repeats.
"""

import argparse
import json
import os
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

ROOT = Path(__file__).parents[3]
STEPS, WARMUP, BATCH, LENGTH, WORDS = 30, 5, 16, 128, 8192
TYPES = {"float32": False, "bfloat16": True}


def bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    size = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 6, "intermediate_size": 1536}
    return BertForSequenceClassification(BertConfig(vocab_size=WORDS, num_labels=2, **size))


class Words(Dataset):
    """Random words with a class."""

    def __len__(self) -> int:
        return BATCH * STEPS

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        draw = torch.Generator().manual_seed(index)
        words = torch.randint(WORDS, (LENGTH,), generator=draw)
        return {"input_ids": words, "attention_mask": torch.ones_like(words), "labels": words[0] % 2}


def spec() -> Any:
    from torchtitan.models.spec import ModelSpec

    return ModelSpec(
        build=bert,
        data=Words,
        loss=lambda output, labels: nn.functional.cross_entropy(output.logits, labels),
        layers="bert.encoder.layer",
    )


def here(dtype: str) -> float:
    """Seconds of a step."""
    with tempfile.TemporaryDirectory() as folder:
        values = {
            "model.name": "benchmarks.recipe.peers.own_model:SPEC",
            "job.dump_folder": folder,
            "training.mixed_precision_param": dtype,
            "training.steps": STEPS,
            "training.local_batch_size": BATCH,
            "training.global_batch_size": BATCH,
            "activation_checkpoint.mode": "none",
            "optimizer.lr": 1e-4,
            "lr_scheduler.warmup_steps": 1,
            "metrics.log_freq": 1,
        }
        options = [part for name, value in values.items() for part in (f"--{name}", str(value))]
        subprocess.run([ROOT / "run_llama_train.sh", *options], check=True, capture_output=True, cwd=ROOT)
        records = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    return statistics.median(record["step_seconds"] for record in records[WARMUP:])


def with_trainer(is_short: bool) -> float:
    """Seconds of a step, in the peer's environment."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Times(TrainerCallback):
        def on_step_end(self, *args: object, **kwargs: object) -> None:
            ends.append(time.perf_counter())

    ends: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            per_device_train_batch_size=BATCH,
            max_steps=STEPS,
            learning_rate=1e-4,
            bf16=is_short,
            use_cpu=not torch.cuda.is_available(),
            optim="adamw_torch_fused",
            weight_decay=0.1,
            max_grad_norm=1.0,
            save_strategy="no",
            report_to=[],
            logging_steps=1,
            disable_tqdm=True,
        )
        Trainer(bert(), arguments, train_dataset=Words(), callbacks=[Times()]).train()
    return statistics.median(b - a for a, b in zip(ends[WARMUP:], ends[WARMUP + 1 :], strict=False))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3, help="runs of each (default: %(default)s)")
    parser.add_argument("--trainer", choices=TYPES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.trainer:
        print(with_trainer(TYPES[args.trainer]))
        return
    from benchmarks.recipe.peers.__main__ import PEERS, set_up

    python = set_up(*PEERS["Trainer"][:2])
    print(f"{os.cpu_count()} cores, {args.repeats} runs of each in turn\n")
    print("| type | this recipe | Trainer | ours / theirs |\n| --- | --- | --- | --- |")
    for dtype in TYPES:
        ours, theirs = [], []
        for _ in range(args.repeats):
            ours.append(BATCH / here(dtype))
            command = [python, __file__, "--trainer", dtype]
            theirs.append(BATCH / float(subprocess.check_output(command, text=True).split()[-1]))
        ratio = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
        rates = (f"{statistics.median(each):.1f} samples/s" for each in (ours, theirs))
        print(f"| {dtype} | {' | '.join(rates)} | {ratio:.2f} |", flush=True)


if __name__ == "__main__":
    main()
else:
    SPEC = spec()
