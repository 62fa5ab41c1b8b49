"""Any layout trains as one process does: same batches, loss, gradient norm, parameters."""

import functools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.distributed import cases
from tests.distributed.conftest import Ranks
from tests.tiny_runs import read_records, tiny_config, train_here

COMPILED = {"compile__enable": True, "compile__backend": "aot_eager"}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "FSDP on 2": (2, {"training__local_batch_size": 4}),
    "FSDP on 4": (4, {"training__local_batch_size": 2}),
    "FSDP on 4, parameters kept after forward": (
        4, {"training__local_batch_size": 2, "parallelism__fsdp_reshard_after_forward": "never"}),
    "HSDP 2 x 2": (4, {"training__local_batch_size": 2, "parallelism__data_parallel_replicate_degree": 2}),
    "plain data parallelism on 2": (
        2, {"training__local_batch_size": 4, "parallelism__data_parallel_replicate_degree": 2}),
    "FSDP on 2, accumulating 4": (2, {"training__local_batch_size": 1}),
    "FSDP on 2, recomputing": (
        2, {"training__local_batch_size": 4, "activation_checkpoint__mode": "selective",
            "activation_checkpoint__selective_ac_option": "op"}),
    "TP 2": (2, {"parallelism__tensor_parallel_degree": 2}),
    "TP 4": (4, {"parallelism__tensor_parallel_degree": 4}),
    "TP 2, logits gathered": (
        2, {"parallelism__tensor_parallel_degree": 2, "parallelism__disable_loss_parallel": True}),
    "TP 2, accumulating 4": (2, {"parallelism__tensor_parallel_degree": 2, "training__local_batch_size": 2}),
    "CP 2": (2, {"parallelism__context_parallel_degree": 2}),
    "CP 4": (4, {"parallelism__context_parallel_degree": 4}),
    "FSDP 2 x TP 2": (4, {"parallelism__tensor_parallel_degree": 2, "training__local_batch_size": 4}),
    "FSDP 2 x CP 2": (4, {"parallelism__context_parallel_degree": 2, "training__local_batch_size": 4}),
    "HSDP 2 x TP 2": (
        4, {"training__local_batch_size": 4, "parallelism__data_parallel_replicate_degree": 2,
            "parallelism__tensor_parallel_degree": 2}),
    "CP 2 x TP 2": (4, {"parallelism__context_parallel_degree": 2, "parallelism__tensor_parallel_degree": 2}),
    "TP 2, compiled": (2, {"parallelism__tensor_parallel_degree": 2} | COMPILED),
    "TP 2, logits gathered, compiled": (
        2, {"parallelism__tensor_parallel_degree": 2, "parallelism__disable_loss_parallel": True} | COMPILED),
    "TP 2, compiled with a memory budget": (
        2, {"parallelism__tensor_parallel_degree": 2, "compile__enable": True,
            "compile__backend": "aot_eager_decomp_partition", "activation_checkpoint__mode": "memory_budget"}),
    "FSDP 2 x TP 2, compiled, recomputing": (
        4, {"training__local_batch_size": 4, "parallelism__tensor_parallel_degree": 2,
            "activation_checkpoint__mode": "selective", "activation_checkpoint__selective_ac_option": "op"} | COMPILED),
    "CP 2 x TP 2, compiled": (
        4, {"parallelism__context_parallel_degree": 2, "parallelism__tensor_parallel_degree": 2} | COMPILED),
    "FSDP on 2, fewer streams than slots": (2, {"training__local_batch_size": 4, "training__num_streams": 8}),
}  # fmt: skip


def differences(ours: list[dict[str, Any]], reference: list[dict[str, Any]], key: str) -> float:
    assert [r["step"] for r in ours] == [r["step"] for r in reference] == list(range(1, len(reference) + 1))
    return max(abs(a[key] - b[key]) / abs(b[key]) for a, b in zip(ours, reference, strict=True))


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return train_here(tiny_config(tmp_path_factory.mktemp("one")))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_trains_as_one_process_does(
    ranks: Ranks, one_process: list[dict[str, Any]], tmp_path: Path, layout: str
) -> None:
    world_size, overrides = LAYOUTS[layout]
    records = ranks(cases.train, world_size, str(tmp_path), overrides)[0]
    assert differences(records, one_process, "loss") <= 1e-5
    assert differences(records, one_process, "grad_norm") <= 1e-4
    assert records[-1]["loss"] < records[0]["loss"] - 0.1
    assert [r["tokens_seen"] for r in records] == [r["tokens_seen"] for r in one_process]


OPTIONS: dict[str, dict[str, Any]] = {
    "tied embeddings": {"model__flavor": "tiny-tied"},
    # Ranks then count different numbers of labels.
    "documents kept apart": {"model__attn_mask_type": "block_causal"},
    "recompute by operation": {
        "activation_checkpoint__mode": "selective", "activation_checkpoint__selective_ac_option": "op"},
    "compiled": COMPILED,
    "compiled, tied embeddings": {"model__flavor": "tiny-tied"} | COMPILED,
    "bfloat16": {"training__mixed_precision_param": "bfloat16"},
}  # fmt: skip
MIXED: dict[str, dict[str, Any]] = {
    "FSDP 4": {"training__local_batch_size": 2},
    "FSDP 2 x TP 2": {"training__local_batch_size": 4, "parallelism__tensor_parallel_degree": 2},
    "CP 2 x TP 2": {"parallelism__context_parallel_degree": 2, "parallelism__tensor_parallel_degree": 2},
    "FSDP 2 x CP 2": {"training__local_batch_size": 4, "parallelism__context_parallel_degree": 2},
}
COVERED = [("tied embeddings", 0), ("tied embeddings", 1), ("documents kept apart", 0), ("documents kept apart", 2),
           ("documents kept apart", 3), ("recompute by operation", 2), ("compiled", 0), ("compiled", 3),
           ("compiled, tied embeddings", 1), ("bfloat16", 0), ("bfloat16", 2)]  # fmt: skip


@pytest.fixture(scope="module")
def one_process_with(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[dict[str, Any]]]:
    @functools.cache
    def train_with(option: str) -> list[dict[str, Any]]:
        return train_here(tiny_config(tmp_path_factory.mktemp("one"), **OPTIONS[option]))

    return train_with


@pytest.mark.parametrize(("option", "number"), COVERED, ids=[f"{o}, {list(MIXED)[n]}" for o, n in COVERED])
def test_an_option_trains_alike_on_a_layout(
    ranks: Ranks,
    one_process: list[dict[str, Any]],
    one_process_with: Callable[[str], list[dict[str, Any]]],
    tmp_path: Path,
    option: str,
    number: int,
) -> None:
    layout = list(MIXED.values())[number]
    records = ranks(cases.train, 4, str(tmp_path), OPTIONS[option] | layout)[0]
    reference = one_process_with(option)
    if option == "bfloat16":
        assert 0 < differences(reference, one_process, "loss") < 5e-3  # bfloat16 it is, and close to float32
        assert differences(records, reference, "loss") <= 3e-3
        return
    assert differences(records, reference, "loss") <= 1e-5
    assert differences(records, reference, "grad_norm") <= 1e-4


@pytest.mark.skipif(shutil.which("c++") is None, reason="the compiler of compiled code needs a C++ compiler")
def test_a_rank_does_not_take_up_what_another_compiled(
    ranks: Ranks, one_process: list[dict[str, Any]], tmp_path: Path
) -> None:
    overrides = {
        "parallelism__tensor_parallel_degree": 2,
        "compile__enable": True,
        "compile__components": ["loss"],  # its code holds the rank's part of the vocabulary
    }
    for run in ("cold", "from the cache"):
        folder, cache = str(tmp_path / run), str(tmp_path / "cache")
        records = ranks(cases.train_with_compiled_code_from, 2, folder, overrides, cache)[0]
        assert differences(records, one_process, "loss") <= 1e-5, run


def test_initial_and_trained_parameters_do_not_depend_on_the_layout(ranks: Ranks, tmp_path: Path) -> None:
    four, two = {"training__local_batch_size": 2}, {"training__local_batch_size": 4}
    hybrid = four | {"parallelism__data_parallel_replicate_degree": 2}
    split = two | {"parallelism__tensor_parallel_degree": 2}
    for steps, tolerance in [(0, 0.0), (10, 1e-4)]:
        one = ranks(cases.parameters_after, 1, str(tmp_path), steps, two)[0][0]
        on_two = ranks(cases.parameters_after, 2, str(tmp_path), steps, two)[0][0]
        on_four = ranks(cases.parameters_after, 4, str(tmp_path), steps, hybrid)
        with_tp = ranks(cases.parameters_after, 4, str(tmp_path), steps, split)[0][0]
        for name, value in one.items():
            for other in (on_two[name], on_four[0][0][name], with_tp[name]):
                assert (other - value).abs().max() <= tolerance, (name, steps)
            # Replicas hold the same shard: ranks 0 and 2, 1 and 3.
            for rank in (0, 1):
                assert on_four[rank][1][name].equal(on_four[rank + 2][1][name]), (name, steps)


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
    for world_size in (1, 2, 4):
        ranks(cases.train, world_size, str(tmp_path / str(world_size)), overrides | {"metrics__log_freq": 3})
        ends.append(read_records(tmp_path / str(world_size))[-1]["step"])
    assert ends[0] == ends[1] == ends[2]
    assert 1 < ends[0] < 500


def test_a_loss_that_is_not_finite_stops_all_and_names_the_rank_and_its_data(ranks: Ranks, tmp_path: Path) -> None:
    overrides = {"training__local_batch_size": 4, "metrics__log_freq": 4}
    first, second = ranks(cases.train_with_a_bad_batch, 2, str(tmp_path), overrides, 1, 3)
    assert first == second
    assert first.startswith("step 3: loss is nan, gradient norm is nan (on rank 1).")
    assert "This step's update was left out." in first
    assert "rank 1 read:\nslot 4: " in first and "pydocs/train.jsonl:" in first and "rank 0 read" not in first


def test_a_skipped_update_leaves_all_ranks_alike_and_the_run_goes_on(ranks: Ranks, tmp_path: Path) -> None:
    overrides = {"training__local_batch_size": 4, "metrics__log_freq": 5, "training__on_nonfinite": "skip"}
    assert ranks(cases.train_with_a_bad_batch, 2, str(tmp_path), overrides, 1, 3) == ["", ""]
    records = read_records(tmp_path)
    assert [(r["step"], r["skipped_updates"]) for r in records] == [(1, 0), (5, 1), (10, 0)]
    assert records[-1]["loss"] < records[0]["loss"] - 0.1
