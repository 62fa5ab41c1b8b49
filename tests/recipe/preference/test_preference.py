"""Training on pairs (DPO): thirty plain lines over single conversations give the same losses, on any layout."""

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.ranks import Ranks
from tests.recipe.distributed import cases
from tests.recipe.distributed.test_layouts import COMPILED, differences, layout, seldom
from tests.stored_models import store_run
from tests.tiny_runs import read_records, tiny_config, train_here
from torchtitan.__main__ import main
from torchtitan.config.load import ConfigError
from torchtitan.config.schema import Config
from torchtitan.data.chat.pairs import Pair
from torchtitan.data.chat.rows import conversation
from torchtitan.data.chat.sources import open_chats
from torchtitan.data.tokenizers.tokenizer import build_tokenizer
from torchtitan.hardware import Place
from torchtitan.models.decoder.model import Transformer
from torchtitan.models.families import plan_model
from torchtitan.models.spec import IGNORED
from torchtitan.parallel.documents.attention import document_numbers
from torchtitan.refusal import Refusal
from torchtitan.training.assemble import start_run
from torchtitan.weights.stored import open_model

BETA, STEPS = 0.3, 6
ASSETS = Path(__file__).parents[2] / "assets"
TP, PP = {"tp": 2}, {"pp": 2}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "FSDP 2, recomputed": (2, layout(4) | {"activation_checkpoint__mode": "full"}),
    "FSDP 2, compiled": (2, layout(4) | COMPILED),
    "TP 2": (2, layout(**TP)),
    "CP 2": (2, layout(cp=2)),
    "FSDP 2 x TP 2": (4, layout(2, **TP)),  # also two local batches
    "HSDP 2 x 2": (4, layout(2, replicate=2)),
}
OFTEN = ("FSDP 2, recomputed", "CP 2", "FSDP 2 x TP 2")


def pair(draw: random.Random) -> dict[str, Any]:
    """In one of the forms that such rows have."""
    words = [str(draw.randrange(10 ** draw.randrange(1, 9))) for _ in range(3)]
    asked = [{"role": "user", "content": f"Add {words[0]}?"}]
    chosen, rejected = ([{"role": "assistant", "content": word}] for word in (words[1], words[2] + " or so"))
    return draw.choice(
        [
            {"prompt": asked, "chosen": chosen, "rejected": rejected},
            {"chosen": asked + chosen, "rejected": asked + rejected},
            {"prompt": asked[0]["content"], "chosen": words[1], "rejected": words[2] + " or so"},
        ]
    )


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("preference")
    draw = random.Random(3)
    rows = [pair(draw) for _ in range(400)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "checkpoint__enable": True,
        "checkpoint__initial_load_path": str(store_run(folder / "base")),
        "model__chat_template": str(ASSETS / "chat/chat_template.jinja"),
        "model__attn_mask_type": "block_causal",
        "training__preference_beta": BETA,
        "training__dataset_path": str(folder / "pairs.jsonl"),
        "training__chat": "all",
        "training__seq_len": 128,
        "training__steps": STEPS,
        "lr_scheduler__total_steps": STEPS,
        "optimizer__lr": 3e-3,
    }


@pytest.fixture(scope="module")
def alone(keys: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return train_here(tiny_config(tmp_path_factory.mktemp("alone"), **keys))


def batches_of(config: Config) -> list[tuple[list[tuple[Tensor, Tensor]], float]]:
    """Of each step the conversations, each alone: a chosen one and its rejected one in turn; and the rate."""
    found = []
    with start_run(config, plan_model(config), Place(0, 0, 1)) as run:
        loader = run.build_training_loader(0)
        for step in range(config.training.steps):
            batch = loader.next()
            assert batch is not None and batch.documents is not None
            documents = []
            numbers = document_numbers(batch.documents, batch.inputs.shape[1])
            for inputs, labels, ids in zip(batch.inputs, batch.labels, numbers, strict=True):
                each = [(inputs[ids == number], labels[ids == number]) for number in range(int(ids.max()) + 1)]
                documents += [(inputs, labels) for inputs, labels in each if (labels != IGNORED).any()]
            found.append((documents, config.optimizer.lr * run.learning_rate_factor(step + 1)))
        loader.close()
    return found


def log_probability(model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    return -F.cross_entropy(model(inputs[None])[0], labels, ignore_index=IGNORED, reduction="sum")


def test_the_loss_is_that_of_thirty_plain_lines(
    keys: dict[str, Any], alone: list[dict[str, Any]], tmp_path: Path
) -> None:
    config = tiny_config(tmp_path / "run", **keys)
    source = open_model(keys["checkpoint__initial_load_path"])
    model, reference = (Transformer(source.blueprint.shape) for _ in range(2))
    for each in (model, reference):
        each.load_state_dict({name: source.weights.read(name) for name in source.weights.outline})
    section = config.optimizer
    optimizer = torch.optim.AdamW(
        model.parameters(), section.lr, (section.beta1, section.beta2), weight_decay=section.weight_decay
    )
    for (documents, rate), record in zip(batches_of(config), alone, strict=True):
        gains = []
        for inputs, labels in documents:
            with torch.no_grad():
                before = log_probability(reference, inputs, labels)
            gains.append(log_probability(model, inputs, labels) - before)
        margins = BETA * (torch.stack(gains[::2]) - torch.stack(gains[1::2]))
        loss = -F.logsigmoid(margins).mean()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), config.training.max_norm)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        optimizer.zero_grad()
        assert len(margins) > 12  # several pairs a sequence
        assert record["loss"] == pytest.approx(loss.item(), rel=1e-5)
        assert record["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    assert alone[0]["loss"] == pytest.approx(0.693147, rel=1e-5) and alone[-1]["loss"] < 0.6


@pytest.mark.parametrize("name", seldom(LAYOUTS, OFTEN))
def test_every_layout_learns_the_same(
    ranks: Ranks, name: str, keys: dict[str, Any], alone: list[dict[str, Any]], tmp_path: Path
) -> None:
    world_size, overrides = LAYOUTS[name]
    ours = ranks(cases.train, world_size, str(tmp_path), overrides | keys)[0]
    assert differences(ours, alone, "loss") <= 1e-5 and differences(ours, alone, "grad_norm") <= 1e-4


def test_a_run_goes_on_beside_its_first_model_also_with_an_adapter_and_is_validated(
    ranks: Ranks, keys: dict[str, Any], alone: list[dict[str, Any]], tmp_path: Path
) -> None:
    for steps in (2, 4, 6):
        world_size, more = (2, layout(4)) if steps == 4 else (1, {})
        ranks(cases.train, world_size, str(tmp_path / "run"), more | keys | {"training__steps": steps})
    assert differences(read_records(tmp_path / "run"), alone, "loss") <= 1e-5
    other = keys | {"checkpoint__initial_load_path": str(tmp_path / "run/checkpoint/step-2"), "training__steps": 5}
    with pytest.raises(AssertionError, match="this run's reference was .*base.* holds other weights"):
        ranks(cases.train, 2, str(tmp_path / "run"), layout(4) | other)

    adapter = keys | {"lora__rank": 4, "validation__enable": True, "validation__freq": 3, "optimizer__lr": 3e-2}
    adapter |= {"validation__seq_len": 128, "validation__steps": 2, "validation__chat": "all"}
    adapter["validation__dataset"] = "pydocs_validation"  # so that pairs are held out
    whole = train_here(tiny_config(tmp_path / "whole", **adapter))
    with pytest.raises(SystemExit, match="hold no conversation"):  # and not the loss of a model beside itself
        main(["eval", "--checkpoint", str(tmp_path / "whole")])
    for steps in (3, 6):
        train_here(tiny_config(tmp_path / "adapter", **adapter | {"training__steps": steps}))
    assert differences(read_records(tmp_path / "adapter"), whole, "loss") == 0
    split = ranks(cases.train, 4, str(tmp_path / "split"), layout(4, **TP) | adapter)[0]
    assert differences(split, whole, "loss") <= 1e-5
    validated = read_records(tmp_path / "whole", "validation.jsonl")[-1]
    assert validated["accuracy"] > 0.6 and validated["margin"] > 0 and validated["validation_loss"] < 0.69
    assert validated == pytest.approx(read_records(tmp_path / "split", "validation.jsonl")[-1], rel=1e-4)


def test_pairs_are_cut_at_half_a_sequence_and_dropped_without_an_answer(keys: dict[str, Any], tmp_path: Path) -> None:
    config = tiny_config(tmp_path / "run", **keys)
    tokenizer = build_tokenizer(ASSETS / "tokenizer")
    (source,), _ = open_chats([config.training], config, 64, tokenizer)  # type: ignore[list-item]
    long, short = "number " * 40, "one"
    where = lambda: "pairs.jsonl:1"  # noqa: E731
    compose, encoder = source.text_key.compose, source.text_key.encoder  # type: ignore[attr-defined]
    cut = encoder.encode(compose({"prompt": "A?", "chosen": long, "rejected": short}, where), True, True)
    join = cut.index(-(2**31))
    assert join == 32 and len(cut) - join - 1 < 32 and encoder.counts.cut == 1
    assert encoder.encode(compose({"prompt": long, "chosen": short, "rejected": "two"}, where), True, True) == []
    assert encoder.counts.dropped == 2


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"chosen": "a", "prompt": "b"}, "here: the fields 'chosen', 'prompt' hold no pair; expected 'chosen' and"),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "here: 'chosen' and 'rejected' are the same"),
        ({"chosen": "a", "rejected": "b"}, "here: no 'prompt', and 'chosen' and 'rejected' are no lists"),
        ({"chosen": [{"role": "user"}], "rejected": [{"role": "tool"}]}, "have no first message in common"),
        ({"chosen": [{"a": 1}], "rejected": [{"a": 1}, {"a": 2}]}, "here: 'chosen' and 'rejected' go on from each"),
        ({"prompt": "a", "chosen": "b", "rejected": 3}, "here, rejected: 'completion' holds int, not a list"),
    ],
)
def test_a_row_that_is_no_pair(row: dict[str, Any], message: str) -> None:
    with pytest.raises(Refusal, match=re.escape(message)):
        Pair("chosen").compose(row, lambda: "here")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"training__chat": None}, "training.preference_beta = 0.3 learns from pairs of conversations; set"),
        ({"checkpoint__initial_load_path": None}, "holds the run to the model that it begins with"),
        ({"parallelism__pipeline_parallel_degree": 2}, "a loss of pairs needs two whole models; use 1"),
        ({"lora__rank": 2, "lora__initial_load_path": "adapter"}, "the reference is the base without an adapter"),
        ({"validation__enable": True}, "is validated on pairs; set validation.ch"),
    ],
)
def test_what_a_run_on_pairs_cannot_be(
    keys: dict[str, Any], more: dict[str, Any], message: str, tmp_path: Path
) -> None:
    given = {name: value for name, value in (keys | more).items() if value is not None}
    with pytest.raises(ConfigError, match=re.escape(message)):
        tiny_config(tmp_path, 2, **given)


def test_the_two_sides_of_a_pair_are_what_conversations_are(keys: dict[str, Any]) -> None:
    asked, chosen = {"role": "user", "content": "A?"}, {"role": "assistant", "content": "B"}
    rejected = {"role": "assistant", "content": "C"}
    row = {"chosen": [asked, chosen], "rejected": [asked, rejected]}
    both = json.loads(Pair("chosen").compose(row, lambda: "here"))
    for side, answer in zip(both, (chosen, rejected), strict=True):
        plain = json.loads(conversation({"prompt": [asked], "completion": [answer]}, lambda: "here"))
        assert {**side, "where": ""} == {**plain, "where": ""} and side["first"] == 1
