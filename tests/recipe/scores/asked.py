"""What the ranks run for the tests of scores."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tests.tiny_runs import tiny_config, train_here
from torchtitan.__main__ import main
from torchtitan.data.tokenizers.tokenizer import build_tokenizer
from torchtitan.hardware import Place
from torchtitan.tools.text.writer import build_model
from torchtitan.training.scores.generation import Sampling, generate, stop_ids
from torchtitan.training.scores.harness import figures
from torchtitan.weights.stored import open_model

TEMPLATE = "tests/assets/chat/chat_template.jinja"
QUESTIONS = Path("tests/assets/tasks/questions.jsonl")
CHOICES, WRITTEN, PERPLEXITY = (f"tests/assets/tasks/{name}.yaml" for name in ("choices", "written", "perplexity"))
CHATS: dict[str, Any] = {
    "model__chat_template": TEMPLATE,
    "model__attn_mask_type": "block_causal",
    "training__dataset_path": "tests/assets/chat/train.jsonl",
    "training__chat": "all",
    "training__epochs": -1,
    "training__seq_len": 128,
    "validation__enable": True,
    "validation__dataset_path": "tests/assets/chat/validation.jsonl",
    "validation__chat": "all",
    "validation__seq_len": 128,
}


def evaluated(checkpoint: Path, tasks: Sequence[str], *words: str) -> dict[str, float]:
    """The verb's figures, by task and metric."""
    out = checkpoint.parent / "results.json"
    out.unlink(missing_ok=True)
    given = ["eval", "--checkpoint", str(checkpoint), "--tasks", ",".join(tasks), "--out", str(out)]
    main([*given, *words])
    return figures(json.loads(out.read_text())) if out.exists() else {}


def on_a_layout(rank: int, world_size: int, checkpoint: Path, tasks: Sequence[str], words: Sequence[str]) -> Any:
    return evaluated(checkpoint, tasks, *words)


def write_own_task(checkpoint: Path, folder: Path, count: int = 20) -> str:
    """A task whose answers are what the model itself writes, as far as `generate` knows."""
    source = open_model(str(checkpoint))
    model, tokenizer = build_model(source, torch.float32, torch.device("cpu")), build_tokenizer(source.assets)
    questions = [json.loads(line)["question"] for line in QUESTIONS.read_text().splitlines()[:count]]
    lines = []
    for question in questions:
        prompt = tokenizer.encode_prompt(question)
        steps = generate(model, 1000, [prompt], stop_ids(source.assets, tokenizer), 16, Sampling())
        text = tokenizer.decode([token for (token,) in steps if token is not None]).split("\n")[0]
        lines.append(json.dumps({"question": question, "written": text.lstrip()}) + "\n")
    (folder / "own.jsonl").write_text("".join(lines))
    task = Path(WRITTEN).read_text().replace(str(QUESTIONS), str(folder / "own.jsonl")).replace("written\n", "own\n", 1)
    (folder / "own.yaml").write_text(task)
    return str(folder / "own.yaml")


def train(rank: int, world_size: int, folder: str, keys: dict[str, Any]) -> list[dict[str, Any]]:
    return train_here(tiny_config(folder, world_size, **keys), Place(rank, rank, world_size))
