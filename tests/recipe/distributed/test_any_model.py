"""A user's module trains on any layout as in one process, and resumes on another."""

import json
import re
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from tests.ranks import Ranks
from tests.recipe.distributed import cases
from tests.recipe.distributed.test_layouts import differences, seldom
from tests.recipe.own_model import their_models
from tests.tiny_runs import read_records, tiny_config, train_here
from torchtitan.checkpoint.storage import Storage, find_checkpoints
from torchtitan.own_model.weights import _fitted
from torchtitan.refusal import Refusal
from torchtitan.weights.checkpoint import open_checkpoint
from torchtitan.weights.files import open_files
from torchtitan.weights.tensors import Weights

THEIRS = "BERT", "GPT2", "VIT", "T5", "WHISPER", "LLAMA", "MIXTRAL", "HEAD", "TIED_SGD", "QWEN3"
Records = list[dict[str, Any]]


def keys(model: str, local_batch_size: int = 8, **more: Any) -> dict[str, Any]:
    degrees = {"pp": "pipeline_parallel_degree", "schedule": "pipeline_parallel_schedule"}
    degrees |= {"replicate": "data_parallel_replicate_degree", "size": "pipeline_parallel_microbatch_size"}
    return {
        "model__name": f"tests.recipe.own_model.{'their_models' if model in THEIRS else 'any_models'}:{model}",
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
    "MLP, PP 4, a rank of which holds neither end": (4, keys("MLP", pp=4, size=2, schedule="GPipe")),
    "SKIPPING, FSDP 2": (2, keys("SKIPPING", 4)),
    "SKIPPING, local batches": (1, keys("SKIPPING", 2)),
    "SKIPPING, PP 2": (2, keys("SKIPPING", pp=2, size=2, schedule="1F1B")),
    "SKIPPING, PP 2 x FSDP 2": (4, keys("SKIPPING", 4, pp=2, schedule="GPipe")),
    "CONTAINED, TP 2": (2, keys("CONTAINED", parallelism__tensor_parallel_degree=2)),
    "WITHOUT_LAYERS, TP 2": (2, keys("WITHOUT_LAYERS", parallelism__tensor_parallel_degree=2)),
    "SENTENCES, FSDP 2": (2, keys("SENTENCES", 4)),
    "SENTENCES, PP 3, a rank of which reads no lengths": (3, keys("SENTENCES", pp=3, size=2, schedule="1F1B")),
    "SENTENCES, PP 2 x FSDP 2, ZBVZeroBubble": (4, keys("SENTENCES", 4, pp=2, size=1, schedule="ZBVZeroBubble")),
    "TURNED, PP 2, with targets whose samples come second": (2, keys("TURNED", pp=2, size=2, schedule="1F1B")),
    "SETS, FSDP 2": (2, keys("SETS", 4)),
    "STEPS_FIRST, FSDP 2": (2, keys("STEPS_FIRST", 2)),
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
    "QWEN3, TP 2 x FSDP 2": (4, keys("QWEN3", 4, parallelism__tensor_parallel_degree=2)),
    "MIXTRAL, PP 3": (3, keys("MIXTRAL", pp=3, size=2, schedule="1F1B")),
    "OPTIMIZERS, FSDP 2": (2, keys("OPTIMIZERS", 4)),
    "OPTIMIZERS, PP 2 x FSDP 2": (4, keys("OPTIMIZERS", 4, pp=2, schedule="GPipe")),
    "TIED_SGD, PP 2, ZBVZeroBubble": (2, keys("TIED_SGD", pp=2, size=4, schedule="ZBVZeroBubble")),
    "TOWERS, FSDP 2": (2, keys("TOWERS", 4)),
    "GAN, FSDP 2": (2, keys("GAN", 4)),
    "CHOOSING, FSDP 2, a rank of which may not use an expert": (2, keys("CHOOSING", 2)),
    "CHOOSING, HSDP 2 x 2": (4, keys("CHOOSING", 2, replicate=2)),
}


# The others cut another model of a kind in the same way, or cut the same model in fewer ways at once.
SELDOM = {
    "MLP, HSDP 2 x 2", "MLP, PP 2", "SKIPPING, FSDP 2", "SKIPPING, PP 2", "SENTENCES, FSDP 2", "BERT, PP 2 x FSDP 2",
    "HEAD, PP 2 x FSDP 2", "GPT2, PP 3 x FSDP 2", "GPT2, PP 2, ZBVZeroBubble", "VIT, PP 3", "WHISPER, PP 2",
    "LLAMA, PP 2 x FSDP 2", "OPTIMIZERS, FSDP 2",
}  # fmt: skip


@pytest.mark.parametrize("name", seldom(LAYOUTS, LAYOUTS.keys() - SELDOM))
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


def test_the_best_validation_is_kept_and_ends_a_run_that_gets_no_better(ranks: Ranks, tmp_path: Path) -> None:
    """Also after a resume; what all outputs together are measured by is equal on a pipeline and with FSDP."""
    held_out = []
    for world_size, layout in ((1, keys("TURNING")), (4, keys("TURNING", 4, pp=2, schedule="GPipe"))):
        more = {"checkpoint__enable": True, "checkpoint__keep_best": "loss", "checkpoint__keep_latest_k": 1}
        more |= {"validation__freq": 2, "validation__patience": 2, "training__steps": 20}
        folder = tmp_path / str(world_size)
        for _ in range(2):
            records = ranks(cases.train, world_size, str(folder), layout | more)[0]
            assert records[-1]["step"] == 8
            assert {path.name for path in (folder / "checkpoint").iterdir()} == {"step-4", "step-8"}
        held_out.append(read_records(folder, "validation.jsonl"))
        assert [record["step"] for record in held_out[-1]] == [2, 4, 6, 8]
    for alone, ours in zip(*held_out, strict=True):
        assert alone["confusion"] == ours["confusion"] and sum(map(sum, ours["confusion"])) == ours["validation_tokens"]
        assert ours["spread"] == pytest.approx(alone["spread"], rel=1e-5)


def test_the_average_of_the_weights_is_validated_resumed_on_another_layout_and_exported(
    ranks: Ranks, tmp_path: Path
) -> None:
    more = {
        "checkpoint__enable": True,
        "checkpoint__interval": 5,
        "validation__freq": 5,
        "lr_scheduler__total_steps": 10,
    }
    more |= {"optimizer__average_decay": 0.5}
    ranks(cases.train, 1, str(tmp_path / "one"), keys("GPT2") | more)
    parts = [(5, 2, keys("GPT2", pp=2, size=4, schedule="ZBVZeroBubble")), (10, 4, keys("GPT2", 4, pp=2, size=2))]
    for steps, world_size, layout in parts:
        ranks(cases.train, world_size, str(tmp_path / "two"), layout | more | {"training__steps": steps})
    losses = [[r["validation_loss"] for r in read_records(tmp_path / n, "validation.jsonl")] for n in ("one", "two")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5) and len(losses[0]) == 2
    storage, _ = find_checkpoints(str(tmp_path / "one"))
    held = {step: {n: torch.empty(s) for n, s in _sizes(storage, step).items()} for step in (5, 10)}
    for step, tensors in held.items():
        dcp.load(tensors, storage_reader=storage.reader(step), no_dist=True)
    name = "transformer.h.1.mlp.c_fc.weight"
    assert open_checkpoint(storage, 10).read(name).equal(held[10][f"average.{name}"])
    assert not held[10][f"average.{name}"].allclose(held[10][f"model.{name}"])


def _sizes(storage: Storage, step: int) -> dict[str, torch.Size]:
    metadata = storage.reader(step).read_metadata().state_dict_metadata
    return {name: about.size for name, about in metadata.items() if name.startswith(("model.", "average."))}


BFLOAT16 = {"training__mixed_precision_param": "bfloat16"}


@pytest.mark.parametrize(
    ("world_size", "overrides"),
    [
        (1, keys("MLP", training__dtype="bfloat16")),  # without a copy of the weights in float32
        (2, keys("MLP", pp=2, schedule="1F1B")),
        (2, keys("PLACES", 4)),  # by autocast
        (2, keys("PLACES", pp=2, schedule="1F1B")),
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
    alone = one_process(overrides["model__name"].partition(":")[2])[0]
    assert 1e-5 < differences(records, alone, "loss") < 5e-2


@pytest.mark.parametrize(
    ("model", "first", "second"),
    [
        ("SKIPPING", (1, keys("SKIPPING")), (4, keys("SKIPPING", 4, pp=2, schedule="GPipe"))),
        ("SENTENCES", (2, keys("SENTENCES", pp=2, schedule="1F1B")), (2, keys("SENTENCES", 4))),
        ("TOWERS", (2, keys("TOWERS", 4)), (1, keys("TOWERS"))),
        ("OPTIMIZERS", (2, keys("OPTIMIZERS", pp=2, schedule="1F1B")), (2, keys("OPTIMIZERS", 4))),
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
        (keys("SETS", pp=2), "inputs hold a tensor of size .* for 2 samples and .* for 3, and a.*let collate stack"),
        (keys("STEPS_FIRST", pp=2), "an input counts the samples in dimension 1.*batch_first=True"),
        (
            keys("FLAGGED", pp=2),
            "inputs hold 'True' where the first sample's hold 'False', and a pipeline passes on tensors",
        ),
        (keys("PACKED", pp=2), "gru.0 gives a structure that cannot be made without its tensors.*PackedSequence"),
        (keys("CLIP_LIKE", 4), "the step .* no mean over samples.*2 pieces.*local_loss = True"),
        (keys("DRAWN_AT_IMPORT", 4), "not the same on all ranks: rank 0 has 96 samples.*draw in it with torch"),
        (keys("HEAD", pp=2, schedule="ZBVZeroBubble"), "all weights before stage 1 are frozen.*torch would lose"),
        (keys("TOWERS", pp=2, schedule="1F1B"), "has a step of its own"),
        (
            keys("MLP", 4, checkpoint__enable=True, checkpoint__keep_best="-acuracy"),
            'keep_best = "-acuracy" is no metric of .*MLP; use one of loss, accuracy',
        ),
        (keys("DROPOUT", pp=2, schedule="Interleaved1F1B"), "4 pipeline stages, but the model calls only 3 parts"),
        (keys("MLP", parallelism__tensor_parallel_degree=2), "tensor_plan.*these modules: "),
        (keys("MIXTRAL", parallelism__tensor_parallel_degree=2), "says moe_tp_experts, packed_colwise, which are no"),
        (keys("LLAMA", parallelism__tensor_parallel_degree=2), "does not divide .*num_key_value_heads = 1"),
        (keys("MISSPELT", parallelism__tensor_parallel_degree=2), 'splits "blocks.*.O".*for instance to .blocks.*.0.'),
        (keys("INCOMPLETE", parallelism__tensor_parallel_degree=2), "incomplete.* blocks.0.2 fails.*give blocks.0.2 R"),
        (
            keys("WITH_NAN", 4, validation__enable=False),
            "Inspect the samples.*slot 0: sample 20, whose own loss is nan.*slot 1: sample 88, whose own loss is nan",
        ),
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


def _write(folder: Path, form: str, state: dict[str, torch.Tensor]) -> Path:
    """The weights as others write them: a hub folder of two files, or one file in a form of torch.save."""
    if form == "hub":
        names = list(state)
        files = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
        for file, part in files.items():
            save_file({name: state[name].clone() for name in part}, folder / file)
        index = {"weight_map": {name: file for file, part in files.items() for name in part}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        return folder
    held = {"epoch": 3, "state_dict": {f"module.{name}": value.bfloat16() for name, value in state.items()}}
    torch.save(state if form == "plain" else held, folder / "weights.pt", _use_new_zipfile_serialization=form != "old")
    return folder / "weights.pt"


@pytest.mark.parametrize(
    ("form", "world_size", "overrides"),
    [
        ("hub", 4, keys("GPT2", 4, pp=2, size=2, schedule="GPipe")),
        ("plain", 2, keys("GPT2", pp=2, size=4, schedule="ZBVZeroBubble")),  # one rank has both ends of the tie
        ("nested", 2, keys("GPT2", 4)),
        ("old", 1, keys("GPT2")),
    ],
)
def test_a_run_starts_from_weights_that_others_saved(
    ranks: Ranks, tmp_path: Path, form: str, world_size: int, overrides: dict[str, Any]
) -> None:
    torch.manual_seed(7)
    state = their_models.GPT2.build().state_dict()
    state.pop("lm_head.weight")  # the file has one name of the tied weight, as safetensors do
    path = _write(tmp_path, form, state)
    more = {"checkpoint__enable": True, "checkpoint__initial_load_path": str(path), "optimizer__lr": 1e-12}
    ranks(cases.train, world_size, str(tmp_path / "run"), overrides | more | {"training__steps": 1})
    saved = open_checkpoint(*find_checkpoints(str(tmp_path / "run/checkpoint/step-1")))
    tolerance = 1e-2 if form in ("nested", "old") else 1e-9
    assert saved.outline.keys() == state.keys()
    assert all((saved.read(name) - state[name]).abs().max() <= tolerance for name in state)


def test_weights_that_do_not_fit_are_listed_and_a_new_head_is_allowed(ranks: Ranks, tmp_path: Path) -> None:
    state = their_models.BERT.build().state_dict()
    first = state.pop("classifier.weight")
    state["classifier.bias"], state["cls.predictions.bias"] = torch.zeros(3), torch.zeros(50)
    path = tmp_path / "weights.safetensors"
    save_file(state, path)
    more = {"checkpoint__enable": True, "checkpoint__initial_load_path": str(path), "training__steps": 1}
    overrides = keys("BERT", pp=2, size=4, schedule="GPipe") | more
    said = ranks(cases.refused, 2, str(tmp_path / "run"), overrides)[1]
    assert "classifier.weight is missing there; classifier.bias is [3] there, [2] here; and it has" in said
    assert "but the model has not: cls.predictions.bias; for weights that may keep" in said
    wrong = overrides | {"checkpoint__initial_load_missing": ["clasifier.*"]}
    assert '"clasifier.*", which no name of the model' in ranks(cases.refused, 2, str(tmp_path / "run"), wrong)[0]
    right = overrides | {"checkpoint__initial_load_missing": ["classifier.*"], "optimizer__lr": 1e-12}
    ranks(cases.train, 2, str(tmp_path / "run"), right)
    saved = open_checkpoint(*find_checkpoints(str(tmp_path / "run/checkpoint/step-1")))
    assert saved.read("bert.embeddings.word_embeddings.weight").allclose(
        state["bert.embeddings.word_embeddings.weight"]
    )
    assert saved.read("classifier.weight").shape == first.shape

    # A run's own checkpoint may lack a new head, too.
    again = {
        "checkpoint__initial_load_path": str(tmp_path / "run"),
        "checkpoint__initial_load_missing": ["classifier.*"],
    }
    ranks(cases.train, 1, str(tmp_path / "again"), keys("BERT") | more | again)


def _state(names: Iterable[str]) -> Weights:
    return Weights("there", {name: torch.ones(1, device="meta") for name in names}, lambda name, tensor: None)


@pytest.mark.parametrize(
    ("there", "here", "read"),
    [
        (["module.a.w", "module.b.w"], ["a.w", "b.w"], {"a.w", "b.w"}),  # of a wrapper
        (["embed.LayerNorm.gamma", "pooler.beta"], ["bert.embed.LayerNorm.weight", "head.w"],
         {"bert.embed.LayerNorm.weight", "pooler.bias"}),  # of 2018, and without the model's own name
        (["bert.a.w", "cls.w"], ["a.w", "pool.w"], {"a.w", "cls.w"}),
        (["1.w", "2.w"], ["one.1.w", "one.2.w", "other.1.w", "other.2.w"], {"1.w", "2.w"}),  # of which of the two?
    ],
)  # fmt: skip
def test_names_are_read_as_the_models_where_only_what_is_before_them_differs(
    there: list[str], here: list[str], read: set[str]
) -> None:
    assert set(_fitted(_state(there), set(here)).outline) == read


class _Other:
    pass


@pytest.mark.parametrize(
    ("held", "says"),
    [
        ({"model": _Other()}, "holds a .*_Other, and.*save the weights alone"),
        ({"G": {"a": torch.ones(1)}, "D": {"a": torch.ones(1)}}, "no state dict, or several .G, D."),
        (b"no file of torch", "is no file of torch.save"),
    ],
)
def test_a_file_without_plain_weights_is_refused(tmp_path: Path, held: Any, says: str) -> None:
    path = tmp_path / "weights.pt"
    if isinstance(held, bytes):
        path.write_bytes(held)
    else:
        torch.save(held, path)
    with pytest.raises(Refusal, match=says):
        open_files([path])
