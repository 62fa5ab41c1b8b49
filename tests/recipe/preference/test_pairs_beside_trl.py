"""Pairs beside TRL: losses and gradients as its DPOTrainer computes them, of the same pairs in the same batches.

TRL computes in float64. In float32 the gradient of its logarithms of probabilities is off by up to 1.5e-5 of its norm.
"""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.recipe.chat.templates import random_messages, random_text, write_tokenizer
from tests.tiny_runs import documents_read, tiny_config, train_here
from torchtitan.config.schema import Config
from torchtitan.models.spec import IGNORED
from torchtitan.training.optimizer.lr_schedule import learning_rate_factor

trl = pytest.importorskip("trl", reason="TRL needs Python 3.11")
STEPS, BETA, LENGTH = 8, 0.1, 256
SIDES = ("chosen", "rejected")
BATCH = {"training__local_batch_size": 1, "training__global_batch_size": 2}
SHAPE = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}


def random_pair(draw: random.Random) -> dict[str, Any]:
    """After one or two questions, two answers."""
    messages = random_messages(draw)
    while messages[-1]["role"] != "user":
        messages.pop()
    answers = ([{"role": "assistant", "content": f"{side} {random_text(draw)}"}] for side in ("Yes", "No"))
    return {"prompt": messages[-1:], **dict(zip(SIDES, answers, strict=True))}


def length(tokenizer: Any, row: dict[str, Any], side: str) -> int:
    return len(tokenizer.apply_chat_template(row["prompt"] + row[side])["input_ids"])


class Trainer(trl.DPOTrainer):  # type: ignore[misc]
    """Takes the pairs that each of our batches has, and keeps the losses, which the log rounds."""

    steps: list[list[int]]

    def get_train_dataloader(self) -> Any:
        kept = self.train_dataset.select_columns(["prompt_ids", "chosen_ids", "rejected_ids"])
        return torch.utils.data.DataLoader(kept, batch_sampler=self.steps, collate_fn=self.data_collator)

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(*args, **kwargs)
        self.seen = [*getattr(self, "seen", []), loss.item()]
        return loss


def build_trainer(folder: Path, rows: list[dict[str, Any]], config: Config, rates: list[float]) -> Trainer:
    import transformers
    from datasets import Dataset

    section = config.optimizer
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    adamw = torch.optim.AdamW(model.parameters(), section.lr, (section.beta1, section.beta2), section.eps, 0.0)
    return Trainer(
        model,
        args=trl.DPOConfig(
            output_dir=str(folder / "out"),
            beta=BETA,
            max_length=None,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            max_grad_norm=config.training.max_norm,
            max_steps=STEPS,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
        ),
        train_dataset=Dataset.from_list(rows),
        processing_class=transformers.AutoTokenizer.from_pretrained(folder, pad_token="<|end_of_text|>"),
        optimizers=(adamw, torch.optim.lr_scheduler.LambdaLR(adamw, lambda step: rates[min(step, STEPS - 1)])),
    )


def learned(inputs: list[int], labels: list[int]) -> tuple[int, ...]:
    """A conversation to the last token that is learned. A batch has a chosen one and its rejected one in turn."""
    last = max(place for place, label in enumerate(labels) if label != IGNORED)
    return (*inputs[: last + 1], labels[last])


def test_losses_and_gradients_are_those_of_trls_trainer(tmp_path: Path) -> None:
    """The same weights and pairs, which stand alone and padded there, and here side by side in sequences."""
    import transformers

    template = (Path(trl.__file__).parent / "chat_templates/llama3.jinja").read_text()
    folder, draw = write_tokenizer(tmp_path / "model", template), random.Random(0)
    torch.manual_seed(0)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    shape = transformers.LlamaConfig(
        vocab_size=len(tokenizer), num_key_value_heads=2, max_position_embeddings=1024, **SHAPE
    )
    transformers.LlamaForCausalLM(shape).save_pretrained(folder)
    drawn = [random_pair(draw) for _ in range(200)]
    rows = [row for row in drawn if all(length(tokenizer, row, side) <= LENGTH // 2 for side in SIDES)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = {"model__name": "llama3", "model__flavor": "config.json", "model__hf_assets_path": str(folder)}
    keys |= {"checkpoint__enable": True, "checkpoint__initial_load_path": str(folder), "optimizer__weight_decay": 0.0}
    keys |= {"model__attn_mask_type": "block_causal", "training__chat": "all", "training__preference_beta": BETA}
    keys |= {
        "training__dataset_path": str(tmp_path / "pairs.jsonl"),
        "training__seq_len": LENGTH,
        "optimizer__lr": 1e-3,
    }
    keys["optimizer__eps"] = 1e-4  # or the first updates are the signs of gradients, also of those that rounding leaves
    config = tiny_config(tmp_path / "ours", **keys, training__steps=STEPS, **BATCH)

    batches = [[learned(*conversation) for conversation in batch] for batch in documents_read(config, STEPS)]
    rates = [learning_rate_factor(step, config.lr_scheduler, STEPS) for step in range(1, STEPS + 1)]
    trainer = build_trainer(folder, rows, config, rates)
    known = {
        (*row["prompt_ids"], *row["chosen_ids"], -1, *row["prompt_ids"], *row["rejected_ids"]): number
        for number, row in enumerate(trainer.train_dataset)
    }
    trainer.steps = [[known[(*a, -1, *b)] for a, b in zip(batch[::2], batch[1::2], strict=True)] for batch in batches]
    trainer.train()
    norms = [record["grad_norm"] for record in trainer.state.log_history if "grad_norm" in record]
    ours = train_here(config)
    assert len(set(map(len, batches))) > 1 and min(map(len, batches)) >= 4  # two pairs or more, of unlike numbers
    assert [record["loss"] for record in ours] == pytest.approx(trainer.seen, rel=1e-5)
    assert [record["grad_norm"] for record in ours] == pytest.approx(norms, rel=1e-5)
    assert trainer.seen[0] == pytest.approx(0.693147, rel=1e-5) and trainer.seen[-1] < 0.65
