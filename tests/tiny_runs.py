"""A tiny model and a tiny run: what the tests train, in the process they are called in."""

import contextlib
import functools
import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import train
from tests.tiny_models import TINY, TINY_TIED  # noqa: F401  (for the tests)
from torchtitan.config.load import check
from torchtitan.config.names import sections
from torchtitan.config.schema import Config, Section
from torchtitan.hardware import Place
from torchtitan.models.families import plan_model
from torchtitan.models.spec import IGNORED
from torchtitan.training.seed_checkpoint import save_seed_checkpoint

BASE = {
    "model.name": "tests.tiny_models:LLAMA",
    "model.flavor": "tiny",
    "training.dataset": "pydocs",
    "training.seq_len": 64,
    "training.local_batch_size": 8,
    "training.global_batch_size": 8,
    "training.steps": 10,
    "training.mixed_precision_param": "float32",
    "optimizer.lr": 1e-2,
    "lr_scheduler.warmup_steps": 1,
    "activation_checkpoint.mode": "none",
    "metrics.log_freq": 1,
    "debug.seed": 0,
}


def tiny_config(dump_folder: Path | str, world_size: int = 1, **overrides: Any) -> Config:
    """The base run with some keys changed; `__` stands for the dot."""
    values = BASE | {"job.dump_folder": str(dump_folder)} | {k.replace("__", "."): v for k, v in overrides.items()}
    data: dict[str, Any] = {}
    for name, value in values.items():
        *sections, key = name.split(".")
        table = functools.reduce(lambda table, section: table.setdefault(section, {}), sections, data)
        table[key] = str(value) if isinstance(value, Path) else value
    return check(data, "a test", world_size)


def train_here(config: Config, place: Place | None = None) -> list[dict[str, Any]]:
    """Run train.py's main in this process; the logged records."""
    place = place or Place(0, 0, 1)
    main = save_seed_checkpoint if config.checkpoint.create_seed_checkpoint else train.main
    main(config, plan_model(config), place)
    file = Path(config.job.dump_folder) / "metrics.jsonl"
    return read_records(file.parent) if place.rank == 0 and file.exists() else []


def documents_read(config: Config, steps: int) -> list[list[tuple[list[int], list[int]]]]:
    """Inputs and labels of the documents in each global batch that a run on one rank will read, but for padding."""
    from torchtitan.training.assemble import start_run

    found: list[list[tuple[list[int], list[int]]]] = []
    with start_run(config, plan_model(config), Place(0, 0, 1)) as run:
        loader = run.build_training_loader(0)
        for batch in [loader.next() for _ in range(steps)]:
            found.append([])
            rows = zip(batch.inputs.tolist(), batch.labels.tolist(), batch.documents, strict=True)
            for inputs, labels, starts in rows:
                for begin, end in pairwise(starts.tolist()):
                    if any(label != IGNORED for label in labels[begin:end]):
                        found[-1].append((inputs[begin:end], labels[begin:end]))
        loader.close()
    return found


def read_records(folder: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


@contextlib.contextmanager
def keys_read() -> Iterator[set[str]]:
    """The configuration's keys that are read meanwhile, with their sections."""
    names = {section: name for name, section in sections().items()}
    read: set[str] = set()
    original = Section.__getattribute__

    def watched(self: Section, key: str) -> Any:
        if type(self) in names and key in type(self).model_fields:
            read.add(f"{names[type(self)]}.{key}")
        return original(self, key)

    Section.__getattribute__ = watched  # type: ignore[assignment, method-assign]
    try:
        yield read
    finally:
        Section.__getattribute__ = original  # type: ignore[method-assign]
