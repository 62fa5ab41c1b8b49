"""A user's module trains on any layout as in one process, and resumes on another."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.distributed import cases
from tests.distributed.conftest import Ranks
from tests.distributed.test_layouts import differences
from tests.tiny_runs import read_records, tiny_config, train_here

THEIRS = "BERT", "GPT2", "VIT", "T5", "WHISPER", "LLAMA", "MIXTRAL", "HEAD"
Records = list[dict[str, Any]]


def keys(model: str, local_batch_size: int = 8, **more: Any) -> dict[str, Any]:
    degrees = {"pp": "pipeline_parallel_degree", "schedule": "pipeline_parallel_schedule"}
    degrees |= {"replicate": "data_parallel_replicate_degree", "size": "pipeline_parallel_microbatch_size"}
    return {
        "model__name": f"tests.own_model.{'their_models' if model in THEIRS else 'any_models'}:{model}",
        "training__local_batch_size": local_batch_size,
        "training__epochs": -1,
        "optimizer__lr": 1e-3 if model in THEIRS else 1e-2,
        "validation__enable": model != "TOWERS",  # a stream that cannot be divided
        "validation__freq": 5,
        "validation__local_batch_size": local_batch_size,
    } | {f"parallelism__{degrees[key]}" if key in degrees else key: value for key, value in more.items()}


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Records, Records]]:
    seen: dict[str, tuple[Records, Records]] = {}

    def train(model: str) -> tuple[Records, Records]:
        if model not in seen:
            folder = tmp_path_factory.mktemp("one")
            records = train_here(tiny_config(folder, **keys(model)))
            assert model in THEIRS or records[-1]["loss"] < records[0]["loss"]
            held_out = read_records(folder, "validation.jsonl") if model != "TOWERS" else []
            seen[model] = records, held_out
        return seen[model]

    return train


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "MLP, FSDP 2": (2, keys("MLP", 4)),
    "MLP, HSDP 2 x 2": (4, keys("MLP", 2, replicate=2)),
    "MLP, PP 2": (2, keys("MLP", pp=2, schedule="1F1B")),
    "MLP, PP 2, Interleaved1F1B": (2, keys("MLP", pp=2, schedule="Interleaved1F1B")),
    "MLP, PP 2, ZBVZeroBubble": (2, keys("MLP", pp=2, schedule="ZBVZeroBubble")),
    "MLP, PP 4, a rank of which holds neither end": (4, keys("MLP", pp=4, size=2, schedule="GPipe")),
    "SKIPPING, FSDP 2": (2, keys("SKIPPING", 4)),
    "SKIPPING, local batches": (1, keys("SKIPPING", 2)),
    "SKIPPING, PP 2": (2, keys("SKIPPING", pp=2, size=2, schedule="1F1B")),
    "SKIPPING, PP 2 x FSDP 2": (4, keys("SKIPPING", 4, pp=2, schedule="GPipe")),
    "SKIPPING, PP 4": (4, keys("SKIPPING", pp=4, size=2, schedule="1F1B")),
    "CONTAINED, TP 2": (2, keys("CONTAINED", parallelism__tensor_parallel_degree=2)),
    "WITHOUT_LAYERS, TP 2": (2, keys("WITHOUT_LAYERS", parallelism__tensor_parallel_degree=2)),
    "BERT, PP 2 x FSDP 2": (4, keys("BERT", 4, pp=2, size=2, schedule="GPipe")),
    "BERT, PP 3, uneven": (3, keys("BERT", pp=3, size=2, parallelism__pipeline_parallel_layer_counts=[4, 1, 2])),
    "HEAD, PP 3, two stages of which train nothing": (3, keys("HEAD", pp=3, size=2, schedule="1F1B")),
    "HEAD, PP 2 x FSDP 2": (4, keys("HEAD", 4, pp=2, size=2, schedule="GPipe")),
    "GPT2, PP 2, Interleaved1F1B": (2, keys("GPT2", pp=2, size=4, schedule="Interleaved1F1B")),
    "GPT2, PP 3 x FSDP 2": (6, keys("GPT2", 4, pp=3, size=2, schedule="GPipe")),
    "GPT2, PP 2, ZBVZeroBubble": (2, keys("GPT2", pp=2, size=4, schedule="ZBVZeroBubble")),
    "VIT, PP 3": (3, keys("VIT", pp=3, size=2, schedule="1F1B")),
    "T5, PP 3": (3, keys("T5", pp=3, size=2, schedule="1F1B")),
    "WHISPER, PP 2": (2, keys("WHISPER", pp=2, schedule="1F1B")),
    "LLAMA, PP 2 x FSDP 2": (4, keys("LLAMA", 4, pp=2, size=2, schedule="1F1B")),
    "MIXTRAL, PP 3": (3, keys("MIXTRAL", pp=3, size=2, schedule="1F1B")),
    "TOWERS, FSDP 2": (2, keys("TOWERS", 4)),
    "TOWERS, FSDP 4": (4, keys("TOWERS", 2)),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_trains_and_validates_as_one_process_does(
    ranks: Ranks, tmp_path: Path, one_process: Callable[[str], tuple[Records, Records]], name: str
) -> None:
    world_size, overrides = LAYOUTS[name]
    alone, held_out_alone = one_process(name.partition(",")[0])
    records = ranks(cases.train, world_size, str(tmp_path), overrides)[0]
    assert differences(records, alone, "loss") < 1e-5 and differences(records, alone, "grad_norm") < 1e-4
    held_out = read_records(tmp_path, "validation.jsonl") if held_out_alone else []
    for ours, theirs in zip(held_out, held_out_alone, strict=True):
        assert ours["validation_tokens"] == theirs["validation_tokens"]
        assert all(abs(ours[key] - theirs[key]) < 1e-4 for key in theirs)


BFLOAT16 = {"training__mixed_precision_param": "bfloat16"}


@pytest.mark.parametrize(
    ("world_size", "overrides"),
    [
        (1, keys("MLP", training__dtype="bfloat16")),  # without a copy of the weights in float32
        (2, keys("MLP", pp=2, schedule="1F1B")),
    ],
)
def test_bfloat16_computes_in_bfloat16(
    ranks: Ranks,
    tmp_path: Path,
    one_process: Callable[[str], tuple[Records, Records]],
    world_size: int,
    overrides: dict[str, Any],
) -> None:
    records = ranks(cases.train, world_size, str(tmp_path), overrides | BFLOAT16)[0]
    assert 1e-5 < differences(records, one_process("MLP")[0], "loss") < 5e-2


@pytest.mark.parametrize(
    ("model", "first", "second"),
    [
        ("SKIPPING", (1, keys("SKIPPING")), (4, keys("SKIPPING", 4, pp=2, schedule="GPipe"))),
        ("SKIPPING", (2, keys("SKIPPING", pp=2, schedule="1F1B")), (2, keys("SKIPPING", 4))),
        ("TOWERS", (2, keys("TOWERS", 4)), (1, keys("TOWERS"))),
        ("GPT2", (2, keys("GPT2", pp=2, size=4, schedule="ZBVZeroBubble")), (2, keys("GPT2", 4))),
        ("GPT2", (2, keys("GPT2", 4)), (3, keys("GPT2", pp=3, size=2, schedule="1F1B"))),
    ],
)
def test_a_run_resumes_on_another_layout(
    ranks: Ranks,
    tmp_path: Path,
    one_process: Callable[[str], tuple[Records, Records]],
    model: str,
    first: tuple[int, dict[str, Any]],
    second: tuple[int, dict[str, Any]],
) -> None:
    more = {"checkpoint__enable": True, "lr_scheduler__total_steps": 10}
    for (world_size, overrides), steps in ((first, 6), (second, 10)):
        records = ranks(cases.train, world_size, str(tmp_path), overrides | more | {"training__steps": steps})[0]
    assert differences(records, one_process(model)[0], "loss") < 1e-5


@pytest.mark.parametrize("rank_keys", [keys("MLP", pp=4, size=2, schedule="GPipe"), None])
def test_ranks_between_the_ends_of_a_pipeline_need_no_data(
    ranks: Ranks, tmp_path: Path, rank_keys: dict[str, Any] | None
) -> None:
    """Also of a model that reads text."""
    shutil.copy("tests/assets/pydocs/train.jsonl", tmp_path / "text.jsonl")
    text = {"parallelism__pipeline_parallel_degree": 4, "parallelism__pipeline_parallel_schedule": "GPipe"}
    text |= {"model__flavor": "tiny-deep", "training__dataset_path": str(tmp_path / "text.jsonl")}
    records = ranks(cases.train_blind_between_ends, 4, str(tmp_path), rank_keys or text)[0]
    assert len(records) == 10 and records[-1]["loss"] < records[0]["loss"]


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (keys("BATCH_NORM", 4), "1 is a BatchNorm1d, whose numbers depend on the batch.*2 pieces.*GroupNorm"),
        (
            keys("BRANCHING", pp=2, schedule="1F1B"),
            "looks at numbers that come from a to decide.*cannot be cut into pipeline stages.*move the decision",
        ),
        (keys("HEAD", pp=2, schedule="ZBVZeroBubble"), "all weights before stage 1 are frozen.*torch would lose"),
        (keys("TOWERS", pp=2, schedule="1F1B"), "has a step of its own"),
        (keys("DROPOUT", pp=2, schedule="Interleaved1F1B"), "4 pipeline stages, but the model calls only 3 parts"),
        (keys("MLP", parallelism__tensor_parallel_degree=2), "tensor_plan.*these modules: "),
        (keys("MISSPELT", parallelism__tensor_parallel_degree=2), 'splits "blocks.*.O".*for instance to .blocks.*.0.'),
        (keys("NOTHING_SPLIT", parallelism__tensor_parallel_degree=2), "the tensor_plan splits no weight"),
        (
            keys("COUNTING_TOGETHER", pp=2, size=8, schedule="GPipe"),
            "share the buffer blocks.0.first.count as blocks.0.first.count and blocks.1.first.count, and forward",
        ),
        (keys("MLP", parallelism__context_parallel_degree=2), "has no sequence to cut"),
    ],
)
def test_what_would_train_another_model_is_refused(
    ranks: Ranks, tmp_path: Path, overrides: dict[str, Any], says: str
) -> None:
    assert re.search(says, ranks(cases.refused, 2, str(tmp_path), overrides)[0], re.DOTALL)


def test_the_log_says_what_is_split_recomputed_and_compiled(ranks: Ranks, tmp_path: Path) -> None:
    """Of a list whose entries are containers, each of which is a layer."""
    overrides = keys("CONTAINED", parallelism__tensor_parallel_degree=2, activation_checkpoint__mode="selective")
    overrides |= {"activation_checkpoint__selective_ac_option": "op"}
    said = ranks(cases.said, 2, str(tmp_path), overrides | {"compile__enable": True, "compile__backend": "eager"})[0]
    assert "tensor parallelism splits 9 of the model's 14 weights over 2 ranks" in said
    assert "in 4 units, of which 3 are layers (recompute: selective, compiled)" in said


def test_dropout_knows_training_from_validation_in_a_pipeline(ranks: Ranks, tmp_path: Path) -> None:
    overrides = keys("DROPOUT", pp=2, schedule="GPipe", validation__freq=1) | {"optimizer__lr": 1e-9}
    ranks(cases.train, 2, str(tmp_path), overrides)
    held_out = {record["validation_loss"] for record in read_records(tmp_path, "validation.jsonl")}
    losses = {record["loss"] for record in read_records(tmp_path)}
    assert max(held_out) - min(held_out) < 1e-5 and max(losses) - min(losses) > 1e-3
