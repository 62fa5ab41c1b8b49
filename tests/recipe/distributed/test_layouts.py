"""Any layout trains as one process does: same batches, loss, gradient norm, parameters."""

import math
import shutil
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks import Ranks
from tests.recipe.distributed import cases
from tests.tiny_runs import read_records, tiny_config, train_here

# 8 layers, for 8 stages. At the other models' rate rounding grows to 1e-4 of the gradient norm within 10 steps.
DEEP = {"model__flavor": "tiny-deep", "optimizer__lr": 3e-3}


def layout(local_batch_size: int = 8, **degrees: Any) -> dict[str, Any]:
    """Keys of [parallelism], shortened: pp=2, tp=2, replicate=2, schedule="GPipe"."""
    long = {
        "replicate": "data_parallel_replicate_degree",
        "tp": "tensor_parallel_degree",
        "cp": "context_parallel_degree",
        "pp": "pipeline_parallel_degree",
        "schedule": "pipeline_parallel_schedule",
        "layer_counts": "pipeline_parallel_layer_counts",
        "microbatch_size": "pipeline_parallel_microbatch_size",
    }
    keys = {f"parallelism__{long.get(key, key)}": value for key, value in degrees.items()}
    return {"training__local_batch_size": local_batch_size} | keys | (DEEP if degrees.get("pp") == 4 else {})


def seldom(cases: Iterable[Any], often: Collection[Any]) -> list[Any]:
    """Test cases, of which those that the others imply run with ./run_tests.sh --all."""
    words = {case: (case,) if isinstance(case, str) else case for case in cases}
    return [case if case in often else pytest.param(*words[case], marks=pytest.mark.all) for case in words]


COMPILED = {"compile__enable": True, "compile__backend": "aot_eager"}
SCHEDULES = ("1F1B", "GPipe", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "FSDP 2": (2, layout(4)),
    "FSDP 4": (4, layout(2)),
    "FSDP 8": (8, layout(1)),
    "FSDP 4, parameters kept after forward": (4, layout(2, fsdp_reshard_after_forward="never")),
    "FSDP 2, fewer streams than slots": (2, layout(4) | {"training__num_streams": 8}),
    "HSDP 2 x 2": (4, layout(2, replicate=2)),
    "plain data parallelism 2": (2, layout(4, replicate=2)),
    "TP 2": (2, layout(tp=2)),
    "TP 4": (4, layout(tp=4)),
    "TP 2, logits gathered": (2, layout(tp=2, disable_loss_parallel=True)),
    "TP 4, logits gathered": (4, layout(tp=4, disable_loss_parallel=True)),
    "CP 2": (2, layout(cp=2)),
    "CP 4": (4, layout(cp=4)),
    **{f"PP 2, {name}": (2, layout(pp=2, schedule=name)) for name in ("1F1B", "ZBVZeroBubble", "DualPipeV")},
    **{f"PP 4, {schedule}": (4, layout(pp=4, schedule=schedule)) for schedule in SCHEDULES},
    "PP 4, stages of 3+1+2+2 layers": (4, layout(pp=4, layer_counts=[3, 1, 2, 2])),
    "PP 2, microbatches of 2": (2, layout(pp=2, microbatch_size=2)),
    "FSDP 2 x TP 2": (4, layout(4, tp=2)),
    "FSDP 2 x CP 2": (4, layout(4, cp=2)),
    "CP 2 x TP 2": (4, layout(cp=2, tp=2)),
    "HSDP 2 x 1 x TP 2": (4, layout(4, replicate=2, tp=2)),
    "PP 2 x FSDP 2": (4, layout(4, pp=2)),
    "PP 2 x FSDP 2, parameters freed after forward": (4, layout(4, pp=2, fsdp_reshard_after_forward="always")),
    "PP 2 x TP 2": (4, layout(pp=2, tp=2, microbatch_size=2)),
    "PP 2 x CP 2": (4, layout(pp=2, cp=2, microbatch_size=2)),
    "PP 2 x CP 2, InterleavedZeroBubble": (4, layout(pp=2, cp=2, microbatch_size=2, schedule="InterleavedZeroBubble")),
    **{
        f"PP 2 x FSDP 2 x TP 2, {schedule}": (8, layout(4, pp=2, tp=2, microbatch_size=2, schedule=schedule))
        for schedule in ("1F1B", "Interleaved1F1B", "ZBVZeroBubble")
    },
    "PP 2 x CP 2 x TP 2": (8, layout(pp=2, cp=2, tp=2, microbatch_size=4)),
    "HSDP 2 x 1 x TP 2 x PP 2": (8, layout(4, replicate=2, tp=2, pp=2, microbatch_size=2)),
}

# What a run may have besides a layout; the exact ones are held as closely as without.
OPTIONS: dict[str, dict[str, Any]] = {
    "tied embeddings": {"tied": True},
    # Ranks then count different numbers of labels.
    "documents kept apart": {"model__attn_mask_type": "block_causal"},
    "documents kept apart, compiled, recompute by operation": {
        "model__attn_mask_type": "block_causal", "activation_checkpoint__mode": "selective",
        "activation_checkpoint__selective_ac_option": "op"} | COMPILED,
    "recompute by operation": {
        "activation_checkpoint__mode": "selective", "activation_checkpoint__selective_ac_option": "op"},
    "recompute every second block": {"activation_checkpoint__mode": "selective"},
    "compiled": COMPILED,
    "compiled, tied embeddings, recompute by operation": {
        "tied": True, "activation_checkpoint__mode": "selective", "activation_checkpoint__selective_ac_option": "op"}
        | COMPILED,
    "compiled with a memory budget": {
        "compile__enable": True, "compile__backend": "aot_eager_decomp_partition",
        "activation_checkpoint__mode": "memory_budget"},
    "updated in backward": {"optimizer__early_step_in_backward": True, "training__max_norm": math.inf, "tied": True},
    "bfloat16": {"training__mixed_precision_param": "bfloat16"},
    "tied embeddings, accumulating, recomputing": {
        "tied": True, "training__global_batch_size": 16, "activation_checkpoint__mode": "full"},
}  # fmt: skip
OPTIMIZERS = {
    "moments in bfloat16": {"optimizer__moments_dtype": "bfloat16"},
    "Muon, moments in bfloat16": {"optimizer__name": "Muon", "optimizer__moments_dtype": "bfloat16"},
}
# Every axis alone and in pairs, uneven stages, and each schedule somewhere: GPipe is the schedule of one's own below,
# Interleaved1F1B validates below, and test_resume.py trains three axes on eight ranks.
OFTEN = (
    "FSDP 2", "HSDP 2 x 2", "plain data parallelism 2", "TP 2", "TP 2, logits gathered", "CP 2", "PP 2, 1F1B",
    "PP 2, ZBVZeroBubble", "PP 2, DualPipeV", "PP 4, LoopedBFS", "PP 4, stages of 3+1+2+2 layers",
    "PP 2 x CP 2, InterleavedZeroBubble", "FSDP 2 x TP 2", "CP 2 x TP 2", "PP 2 x FSDP 2",
)  # fmt: skip
THREE_AXES = [f"PP 2 x FSDP 2 x TP 2, {schedule}" for schedule in ("1F1B", "Interleaved1F1B", "ZBVZeroBubble")]
THREE_AXES += ["PP 2 x CP 2 x TP 2", "HSDP 2 x 1 x TP 2 x PP 2"]
COVERED = [
    *(("tied embeddings, accumulating, recomputing", name) for name in (
        "FSDP 4", "FSDP 4, parameters kept after forward", "FSDP 2, fewer streams than slots", "HSDP 2 x 2",
        "plain data parallelism 2", "CP 2 x TP 2", "FSDP 2 x CP 2", "FSDP 2 x TP 2", "PP 4, DualPipeV",
        "PP 4, InterleavedZeroBubble", "PP 2 x FSDP 2, parameters freed after forward", *THREE_AXES)),
    *(("tied embeddings", name) for name in ("FSDP 4", "FSDP 2 x TP 2", "PP 2 x TP 2")),
    *(("documents kept apart", name) for name in (
        "FSDP 4", "CP 2 x TP 2", "FSDP 2 x CP 2", "PP 2 x CP 2 x TP 2", "PP 2, ZBVZeroBubble")),
    *(("documents kept apart, compiled, recompute by operation", name) for name in ("CP 2 x TP 2", "FSDP 2 x TP 2")),
    *(("recompute by operation", name) for name in ("CP 2 x TP 2", "PP 2 x TP 2")),
    *(("recompute every second block", name) for name in ("FSDP 2", "PP 2 x FSDP 2 x TP 2, ZBVZeroBubble")),
    *(("compiled", name) for name in ("FSDP 2 x CP 2", "TP 2, logits gathered", "CP 2 x TP 2", "PP 2 x FSDP 2")),
    ("compiled, tied embeddings, recompute by operation", "FSDP 2 x TP 2"),
    ("compiled, tied embeddings, recompute by operation", "PP 2 x TP 2"),
    ("compiled with a memory budget", "TP 2"),
    *(("updated in backward", name) for name in ("FSDP 2 x TP 2", "HSDP 2 x 2")),
    *(("bfloat16", name) for name in ("FSDP 4", "CP 2 x TP 2", "PP 2, ZBVZeroBubble", "PP 2 x FSDP 2 x TP 2, 1F1B")),
]  # fmt: skip
COVERED_OFTEN = [
    *(("tied embeddings, accumulating, recomputing", name) for name in (
        "FSDP 4, parameters kept after forward", "FSDP 2, fewer streams than slots",
        "PP 2 x FSDP 2, parameters freed after forward")),
    *(("tied embeddings", name) for name in ("FSDP 2 x TP 2", "PP 2 x TP 2")),
    ("documents kept apart", "FSDP 2 x CP 2"),
    ("recompute by operation", "CP 2 x TP 2"),
    ("recompute every second block", "FSDP 2"),
    *(("compiled", name) for name in ("CP 2 x TP 2", "PP 2 x FSDP 2")),
    ("compiled, tied embeddings, recompute by operation", "FSDP 2 x TP 2"),
    ("compiled with a memory budget", "TP 2"),
    ("updated in backward", "FSDP 2 x TP 2"),
    *(("bfloat16", name) for name in ("CP 2 x TP 2", "PP 2, ZBVZeroBubble")),
]  # fmt: skip


def differences(ours: list[dict[str, Any]], reference: list[dict[str, Any]], key: str) -> float:
    assert [r["step"] for r in ours] == [r["step"] for r in reference] == list(range(1, len(reference) + 1))
    return max(abs(a[key] - b[key]) / abs(b[key]) for a, b in zip(ours, reference, strict=True))


def of_one_process(overrides: dict[str, Any]) -> dict[str, Any]:
    """What of a run's keys is no matter of layout."""
    return {
        key: value
        for key, value in overrides.items()
        if not key.startswith(("parallelism", "compile", "activation", "optimizer__early"))
        and key != "training__local_batch_size"
    }


def with_option(overrides: dict[str, Any], option: str) -> dict[str, Any]:
    both = overrides | OPTIONS[option]
    if both.pop("tied", False):
        both["model__flavor"] = f"{both.get('model__flavor', 'tiny')}-tied"
    return both


def parameter_difference(of_ranks: list[dict[str, cases.Piece]], whole: dict[str, cases.Piece]) -> float:
    """The largest; ranks that hold the same piece must hold the same bits, and together the whole."""
    largest = 0.0
    for name, (_, value) in whole.items():
        held: dict[tuple[int, ...], torch.Tensor] = {}
        for pieces in of_ranks:
            begin, piece = pieces.get(name, ((), torch.empty(0)))
            if piece.numel():
                assert piece.equal(held.setdefault(begin, piece)), name
        assert sum(piece.numel() for piece in held.values()) == value.numel(), name
        for begin, piece in held.items():
            region = tuple(slice(b, b + size) for b, size in zip(begin, piece.shape, strict=True))
            largest = max(largest, (piece - value[region]).abs().max().item())
    return largest


Trained = tuple[list[dict[str, Any]], dict[str, cases.Piece]]
Reference = Callable[[dict[str, Any]], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def trained_alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[dict[str, Any]], Trained]:
    """The records and parameters of one process with the same model, data and steps."""
    trained: dict[str, Trained] = {}

    def train_once(overrides: dict[str, Any]) -> Trained:
        keys = of_one_process(overrides)
        if str(keys) not in trained:
            trained[str(keys)] = cases.train_and_keep(0, 1, str(tmp_path_factory.mktemp("one")), keys)
        return trained[str(keys)]

    return train_once


@pytest.fixture(scope="module")
def one_process(trained_alone: Callable[[dict[str, Any]], Trained]) -> Reference:
    """Its records."""
    return lambda overrides: trained_alone(overrides)[0]


@pytest.mark.parametrize("name", seldom(LAYOUTS, OFTEN))
def test_a_layout_trains_as_one_process_does(
    ranks: Ranks, trained_alone: Callable[[dict[str, Any]], Trained], tmp_path: Path, name: str
) -> None:
    world_size, overrides = LAYOUTS[name]
    overrides = overrides | {"training__steps": 5}
    answers = ranks(cases.train_and_keep, world_size, str(tmp_path), overrides)
    records = answers[0][0]
    reference, parameters = trained_alone(overrides)
    assert differences(records, reference, "loss") <= 1e-5
    assert differences(records, reference, "grad_norm") <= 1e-4
    assert parameter_difference([pieces for _, pieces in answers], parameters) <= 1e-4
    assert records[-1]["loss"] < records[0]["loss"] - 0.1
    assert [r["tokens_seen"] for r in records] == [r["tokens_seen"] for r in reference]


@pytest.mark.parametrize(
    ("option", "name"), seldom(COVERED, COVERED_OFTEN), ids=[f"{option}, {name}" for option, name in COVERED]
)
def test_an_option_trains_alike_on_a_layout(
    ranks: Ranks, one_process: Reference, tmp_path: Path, option: str, name: str
) -> None:
    world_size, overrides = LAYOUTS[name]
    overrides = with_option(overrides, option) | {"training__steps": 2}
    records = ranks(cases.train, world_size, str(tmp_path), overrides)[0]
    reference = one_process(overrides)
    if option == "bfloat16":
        exact = one_process(overrides | {"training__mixed_precision_param": "float32"})
        assert 0 < differences(reference, exact, "loss") < 5e-3  # bfloat16 it is, and close to float32
        assert differences(records, reference, "loss") <= 3e-3
        return
    assert differences(records, reference, "loss") <= 1e-5
    assert differences(records, reference, "grad_norm") <= 1e-4


@pytest.mark.parametrize(("optimizer", "name"), [
    ("moments in bfloat16", "PP 2 x FSDP 2"), ("Muon, moments in bfloat16", "FSDP 2 x TP 2"),
])  # fmt: skip
def test_an_optimizer_that_rounds_trains_nearly_alike_on_a_layout(
    ranks: Ranks, one_process: Reference, tmp_path: Path, optimizer: str, name: str
) -> None:
    """Where sums in another order fall on the other side of a rounding to bfloat16, the update differs by it."""
    world_size, overrides = LAYOUTS[name]
    overrides = overrides | OPTIMIZERS[optimizer] | {"training__steps": 4}
    records = ranks(cases.train, world_size, str(tmp_path), overrides)[0]
    assert differences(records, one_process(overrides), "loss") <= 1e-3
    assert records[-1]["loss"] < records[0]["loss"] - 0.05


@pytest.mark.all
@pytest.mark.skipif(shutil.which("c++") is None, reason="the compiler of compiled code needs a C++ compiler")
def test_a_rank_does_not_take_up_what_another_compiled(ranks: Ranks, one_process: Reference, tmp_path: Path) -> None:
    overrides = layout(tp=2) | {
        "compile__enable": True,
        "compile__components": ["loss"],  # its code holds the rank's part of the vocabulary
    }
    for run in ("cold", "from the cache"):
        folder, cache = str(tmp_path / run), str(tmp_path / "cache")
        records = ranks(cases.train_with_compiled_code_from, 2, folder, overrides, cache)[0]
        assert differences(records, one_process(overrides), "loss") <= 1e-5, run


def test_initial_parameters_do_not_depend_on_the_layout(ranks: Ranks, tmp_path: Path) -> None:
    four, two = {"training__local_batch_size": 2}, {"training__local_batch_size": 4}
    hybrid = four | {"parallelism__data_parallel_replicate_degree": 2}
    split = two | {"parallelism__tensor_parallel_degree": 2}
    one = ranks(cases.parameters_after, 1, str(tmp_path), 0, two)[0][0]
    on_two = ranks(cases.parameters_after, 2, str(tmp_path), 0, two)[0][0]
    on_four = ranks(cases.parameters_after, 4, str(tmp_path), 0, hybrid)
    with_tp = ranks(cases.parameters_after, 4, str(tmp_path), 0, split)[0][0]
    for name, value in one.items():
        for other in (on_two[name], on_four[0][0][name], with_tp[name]):
            assert other.equal(value), name
        # Replicas hold the same shard: ranks 0 and 2, 1 and 3.
        for rank in (0, 1):
            assert on_four[rank][1][name].equal(on_four[rank + 2][1][name]), name


def test_both_copies_of_a_tied_weight_stay_the_same_on_the_first_and_the_last_stage(
    ranks: Ranks, tmp_path: Path
) -> None:
    for world_size, overrides in [(4, layout(4, pp=2)), (2, layout(pp=2, schedule="ZBVZeroBubble"))]:
        overrides = with_option(overrides, "tied embeddings")
        held: dict[str, Any] = {}
        for whole, _ in ranks(cases.parameters_after, world_size, str(tmp_path), 3, overrides):
            held |= whole
        assert held["output.weight"].equal(held["tok_embeddings.weight"])


def test_a_last_stage_may_hold_nothing_but_a_tied_output(ranks: Ranks, one_process: Reference, tmp_path: Path) -> None:
    layers = [f"layers.{i}" for i in range(4)]
    parts = [["tok_embeddings", *layers, "norm"], ["output"]]
    overrides = with_option(layout(pp=2, module_fqns_per_model_part=parts), "tied embeddings")
    records = ranks(cases.train, 2, str(tmp_path), overrides)[0]
    reference = one_process(overrides)
    assert differences(records, reference, "loss") <= 1e-5
    assert differences(records, reference, "grad_norm") <= 1e-4


def test_a_schedule_of_ones_own_trains_as_one_process_does(
    ranks: Ranks, one_process: Reference, tmp_path: Path
) -> None:
    file = tmp_path / "schedule.csv"  # GPipe with backward in the other order
    microbatches = range(8)
    file.write_text(
        "\n".join(
            ",".join([f"{s}F{m}" for m in microbatches] + [f"{s}B{m}" for m in reversed(microbatches)]) for s in (0, 1)
        )
    )
    overrides = layout(pp=2, pipeline_parallel_schedule_csv=str(file))
    for records in ranks(cases.train, 2, str(tmp_path), overrides):
        if records:
            assert differences(records, one_process(overrides), "loss") <= 1e-5
            assert differences(records, one_process(overrides), "grad_norm") <= 1e-4


VALIDATED = ["1F1B", "Interleaved1F1B", "ZBVZeroBubble", "DualPipeV"]


@pytest.mark.parametrize("schedule", seldom(VALIDATED, ["Interleaved1F1B", "ZBVZeroBubble"]))
def test_a_pipeline_validates_between_steps_and_changes_no_step(
    ranks: Ranks, one_process: Reference, tmp_path: Path, schedule: str
) -> None:
    corpus = tmp_path / "held_out.jsonl"
    corpus.write_text("".join(f'{{"text": "{"some words here " * (9 + 70 * i)}"}}\n' for i in range(5)))
    validating = {
        "validation__enable": True,
        "validation__dataset_path": str(corpus),
        "validation__seq_len": 96,
        "validation__freq": 2,
    }
    overrides = layout(4, pp=2, schedule=schedule) | {"training__steps": 4}
    plain = one_process(overrides)
    train_here(tiny_config(tmp_path / "one", **of_one_process(overrides), **validating))
    validating["validation__local_batch_size"] = 4
    records = ranks(cases.train, 4, str(tmp_path / "four"), overrides | validating)[0]
    assert differences(records, plain, "loss") <= 1e-5
    ours, reference = (read_records(tmp_path / name, "validation.jsonl") for name in ("four", "one"))
    assert [r["step"] for r in ours] == [2, 4]
    for one, other in zip(ours, reference, strict=True):
        assert one["validation_tokens"] == other["validation_tokens"] > 1500
        assert one["validation_loss"] == pytest.approx(other["validation_loss"], rel=1e-5)


def test_validation_counts_every_token_once_on_any_number_of_ranks(ranks: Ranks, tmp_path: Path) -> None:
    corpus = tmp_path / "held_out.jsonl"  # fewer documents than the batch has slots, of uneven length
    corpus.write_text("".join(f'{{"text": "{"some words here " * (9 + 70 * i)}"}}\n' for i in range(5)))
    overrides = {
        "validation__enable": True,
        "validation__dataset_path": str(corpus),
        "validation__seq_len": 200,
        "validation__local_batch_size": 3,
        "validation__freq": 2,
        "training__steps": 3,
        "training__local_batch_size": 2,
    }
    seen = {}
    for world_size in (1, 2, 4):
        folder = tmp_path / str(world_size)
        ranks(cases.train, world_size, str(folder), overrides)
        seen[world_size] = read_records(folder, "validation.jsonl")
    assert [r["step"] for r in seen[1]] == [2, 3]
    for world_size in (2, 4):
        for ours, reference in zip(seen[world_size], seen[1], strict=True):
            assert ours["validation_tokens"] == reference["validation_tokens"] > 1500
            assert ours["validation_loss"] == pytest.approx(reference["validation_loss"], rel=1e-5)


def test_data_that_runs_out_ends_all_ranks_at_the_same_step(ranks: Ranks, tmp_path: Path) -> None:
    # Documents of very different length: the ranks' own data ends at different places.
    corpus = tmp_path / "uneven.jsonl"
    corpus.write_text("".join(f'{{"text": "{"word " * (20 + 40 * (i % 4))}"}}\n' for i in range(64)))
    overrides = {"training__dataset_path": str(corpus), "training__steps": 500, "training__local_batch_size": 2}
    ends = []
    for world_size in (1, 4):
        ranks(cases.train, world_size, str(tmp_path / str(world_size)), overrides | {"metrics__log_freq": 3})
        ends.append(read_records(tmp_path / str(world_size))[-1]["step"])
    assert ends[0] == ends[1]
    assert 1 < ends[0] < 500


# On two ranks, and the call of rank 1's loss in step 3: a pipeline's last stage has two microbatches a step.
WITH_A_BAD_BATCH = pytest.mark.parametrize(
    ("overrides", "bad_call", "slot"),
    [(layout(4), 3, 4), (layout(8, pp=2, microbatch_size=4), 6, 0)],
    ids=["FSDP", "PP"],
)


@WITH_A_BAD_BATCH
def test_a_loss_that_is_not_finite_stops_all_and_names_the_rank_and_its_data(
    ranks: Ranks, tmp_path: Path, overrides: dict[str, Any], bad_call: int, slot: int
) -> None:
    overrides = overrides | {"metrics__log_freq": 4}
    first, second = ranks(cases.train_with_a_bad_batch, 2, str(tmp_path), overrides, [bad_call])
    assert first == second
    assert first.startswith("step 3: loss is nan, gradient norm is nan (on rank 1).")
    assert "This step's update was left out." in first
    assert f"rank 1 read:\nslot {slot}: " in first and "pydocs/train.jsonl:" in first and "rank 0 read" not in first


@WITH_A_BAD_BATCH
def test_a_skipped_update_leaves_all_ranks_alike_and_the_run_goes_on(
    ranks: Ranks, tmp_path: Path, overrides: dict[str, Any], bad_call: int, slot: int
) -> None:
    overrides = overrides | {"metrics__log_freq": 5, "training__on_nonfinite": "skip"}
    assert ranks(cases.train_with_a_bad_batch, 2, str(tmp_path), overrides, [bad_call]) == ["", ""]
    records = read_records(tmp_path)
    assert [(r["step"], r["skipped_updates"]) for r in records] == [(1, 0), (5, 1), (10, 0)]
    assert records[-1]["loss"] < records[0]["loss"] - 0.1


def test_too_many_updates_left_out_in_a_row_end_the_run_also_over_a_resume(ranks: Ranks, tmp_path: Path) -> None:
    """Three are too many, whether they are read in one window, in two, or before and after a resume."""
    overrides = layout(4) | {"training__on_nonfinite": "skip", "training__max_consecutive_skips": 2}
    overrides |= {"metrics__log_freq": 3, "checkpoint__enable": True}  # windows of steps 2 and 3, 4 to 6, 7 to 9
    resumed = {"training__steps": 6, "lr_scheduler__total_steps": 10}
    assert ranks(cases.train_with_a_bad_batch, 2, str(tmp_path / "2"), overrides | resumed, [2, 5, 6]) == ["", ""]
    for folder, bad_calls in ((tmp_path / "1", [2, 3, 5, 6, 7]), (tmp_path / "2", [1])):
        first, second = ranks(cases.train_with_a_bad_batch, 2, str(folder), overrides, bad_calls)
        assert first == second
        assert first.startswith("step 7: loss is nan, gradient norm is nan; 3 updates in a row are left out, ")
        assert "training.max_consecutive_skips allows 2 (on rank 1)." in first and "on_nonfinite" not in first
