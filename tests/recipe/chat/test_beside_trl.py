"""Conversations beside TRL: its tokens and labels, and losses and gradients as its SFTTrainer computes them."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.recipe.chat.templates import TEMPLATES, build_encoder, example, random_messages, with_marks, write_tokenizer
from tests.tiny_runs import documents_read, tiny_config, train_here
from torchtitan.models.spec import IGNORED
from torchtitan.training.optimizer.lr_schedule import learning_rate_factor

trl = pytest.importorskip("trl", reason="TRL needs Python 3.11")
STEPS = 10
PUBLISHED = {"llama3": "llama3", "chatml": "qwen2_5", "qwen3": "qwen3"}  # of which TRL has the publisher's template
OF_ONES_OWN = ("folded", "thinking", "renamed")
SHAPE = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}


def template_of(name: str) -> str:
    if name in PUBLISHED:
        return (Path(trl.__file__).parent / f"chat_templates/{PUBLISHED[name]}.jinja").read_text()
    return with_marks(TEMPLATES[name])


def build_trainer(folder: Path, rows: list[dict[str, Any]], kind: type = trl.SFTTrainer, **options: Any) -> Any:
    import transformers
    from datasets import Dataset

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, pad_token="<|end_of_text|>")
    torch.manual_seed(0)
    shape = transformers.LlamaConfig(
        vocab_size=len(tokenizer), num_key_value_heads=2, max_position_embeddings=512, **SHAPE
    )
    given = {"output_dir": str(folder / "out"), "use_cpu": True, "bf16": False, "report_to": "none", "max_length": None}
    given |= {"assistant_only_loss": True, "gradient_checkpointing": False, "train_sampling_strategy": "sequential"}
    optimizers = options.pop("optimizers", lambda _: (None, None))
    model = transformers.LlamaForCausalLM(shape)
    return kind(
        model,
        args=trl.SFTConfig(**given | options),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        optimizers=optimizers(model),
    )


@pytest.mark.parametrize("count", [20, pytest.param(1000, marks=pytest.mark.all)])
@pytest.mark.parametrize("name", [*PUBLISHED, *OF_ONES_OWN])
def test_tokens_and_labels_are_those_of_trl(tmp_path: Path, name: str, count: int) -> None:
    """By the template that TRL trains with: of Qwen's models it changes the publisher's."""
    draw = random.Random(name)
    rows = [random_messages(draw) for _ in range(count)]
    trainer = build_trainer(write_tokenizer(tmp_path / "model", template_of(name)), [{"messages": row} for row in rows])
    encoder = build_encoder(write_tokenizer(tmp_path / "model", trainer.chat_template or template_of(name)))
    for row, theirs in zip(rows, trainer.train_dataset, strict=True):
        own = example(encoder, {"messages": row})
        assert own.ids == theirs["input_ids"]
        assert [i if is_learned else -100 for i, is_learned in zip(own.ids, own.learned, strict=True)] == theirs[
            "labels"
        ]


@pytest.mark.parametrize("name", ["llama3", "chatml"])
def test_of_a_publishers_template_trl_learns_line_breaks_besides(tmp_path: Path, name: str) -> None:
    """The one a prompt ends with, and the one behind the end of a turn, at which an answer stops."""
    draw = random.Random(name)
    rows = [random_messages(draw) for _ in range(20)]
    folder = write_tokenizer(tmp_path / "model", template_of(name))
    trainer, encoder = build_trainer(folder, [{"messages": row} for row in rows]), build_encoder(folder)
    besides = set()
    for row, theirs in zip(rows, trainer.train_dataset, strict=True):
        own = example(encoder, {"messages": row})
        assert own.ids == theirs["input_ids"]
        for token, ours, label in zip(own.ids, own.learned, theirs["labels"], strict=True):
            assert label != -100 or not ours
            besides |= {encoder.speller.decode([token])} if label != -100 and not ours else set()
    assert besides == ({"\n"} if name == "chatml" else set())


def test_losses_and_gradients_are_those_of_trls_trainer(tmp_path: Path) -> None:
    """The same weights and conversations, which stand alone and padded there, and here side by side in sequences."""
    seen = []

    class Trainer(trl.SFTTrainer):  # type: ignore[misc]
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            result = super().compute_loss(*args, **kwargs)
            seen.append((result[0] if isinstance(result, tuple) else result).item())  # the log is rounded
            return result

    folder, draw = write_tokenizer(tmp_path / "model", template_of("llama3")), random.Random(0)
    rows = [{"messages": random_messages(draw)} for _ in range(200)]
    first = build_trainer(folder, rows)
    first.model.save_pretrained(folder)
    fitting = [number for number, row in enumerate(first.train_dataset) if len(row["input_ids"]) <= 128]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(rows[number]) + "\n" for number in fitting))
    keys = {"model__name": "llama3", "model__flavor": "config.json", "model__hf_assets_path": str(folder)}
    keys |= {"checkpoint__enable": True, "checkpoint__initial_load_path": str(folder), "optimizer__weight_decay": 0.0}
    keys |= {"model__attn_mask_type": "block_causal", "training__chat": "all", "training__epochs": -1}
    keys |= {"training__dataset_path": str(tmp_path / "chats.jsonl"), "training__seq_len": 256, "optimizer__lr": 1e-3}
    config = tiny_config(tmp_path / "ours", **keys, training__local_batch_size=1, training__global_batch_size=2)

    known = {tuple(row["input_ids"]): {k: row[k] for k in ("input_ids", "labels")} for row in first.train_dataset}
    batches = [
        [known[tuple(token for token in (*inputs, labels[-1]) if token != IGNORED)] for inputs, labels in batch]
        for batch in documents_read(config, STEPS)
    ]
    size = max(map(len, batches))
    nothing = {"input_ids": [0, 0], "labels": [-100, -100]}
    given = [row for batch in batches for row in (*batch, *[nothing] * (size - len(batch)))]

    def optimizers(model: torch.nn.Module) -> tuple[Any, Any]:
        section = config.optimizer
        adamw = torch.optim.AdamW(model.parameters(), section.lr, (section.beta1, section.beta2), weight_decay=0.0)
        return adamw, torch.optim.lr_scheduler.LambdaLR(adamw, lambda step: rates[min(step, STEPS - 1)])

    rates = [learning_rate_factor(step, config.lr_scheduler, STEPS) for step in range(1, STEPS + 1)]
    options = {
        "assistant_only_loss": False,
        "per_device_train_batch_size": size,
        "max_steps": STEPS,
        "logging_steps": 1,
        "save_strategy": "no",
    }
    trainer = build_trainer(
        folder, given, Trainer, optimizers=optimizers, max_grad_norm=config.training.max_norm, **options
    )
    trainer.train()
    norms = [record["grad_norm"] for record in trainer.state.log_history if "grad_norm" in record]
    ours = train_here(config)
    assert len(set(map(len, batches))) > 1 and min(map(len, batches)) > 2  # several in a sequence, of unlike numbers
    assert [record["loss"] for record in ours] == pytest.approx(seen, rel=1e-5)
    assert [record["grad_norm"] for record in ours] == pytest.approx(norms, rel=1e-5)
    assert seen[-1] < seen[0] - 0.5
