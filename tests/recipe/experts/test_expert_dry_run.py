"""The dry run of mixtures of experts against counts from their sizes alone, and what an even load assumes."""

import re
from pathlib import Path
from unittest import mock

import pytest

from torchtitan.experts.exchange import Exchange
from torchtitan.hardware import Place
from torchtitan.models.families import load_run
from torchtitan.tools.dry_run import experts
from torchtitan.tools.dry_run.estimate import Estimate, estimate
from torchtitan.tools.dry_run.report import dry_run

pytestmark = pytest.mark.slow

FILE = str(Path(__file__).resolve().parents[3] / "train_configs/qwen3_235b_a22b.toml")
RANKS, EP = 512, 8
TINY = ["--model.flavor", "debugmodel", "--model.vocab_size", "2048", "--training.local_batch_size", "4"]


def of_235b(num_layers: int, *options: str) -> Estimate:
    options = ("--model.n_layers", str(num_layers), "--validation.no_enable", *options)
    return estimate(*load_run(["--job.config_file", FILE, *options], RANKS), 0, RANKS)


@pytest.mark.parametrize("num_layers", [6, pytest.param(94, marks=pytest.mark.all)])
def test_235b_on_512_ranks_holds_and_moves_what_its_sizes_say(num_layers: int) -> None:
    """At the fullest moment, the last layer computes again, and the output layer's gradients are on the way."""
    dim, wide, heads, kv_heads, vocabulary, tokens = 4096, 1536, 64 * 128, 4 * 128, 151936, 8192
    rows, one_expert, ends = 8 * tokens, 3 * dim * wide, vocabulary * dim
    block = 2 * dim * (heads + kv_heads) + 2 * dim + 2 * 128 + 128 * dim
    parameters = num_layers * (block + 128 * one_expert) + 2 * ends + dim
    here = 128 // EP * one_expert

    found = of_235b(num_layers)
    assert found.parameters == parameters
    held = {
        "parameters": 4 * parameters / RANKS + 2 * block + 2 * here,  # its own, and the last layer's, gathered
        "gradients": 4 * ends + 4 * ends / RANKS,
        "optimizer": 8 * parameters / RANKS,
        "activations": 2 * tokens * dim * (num_layers + 2)  # layers' inputs, and the output layer's with its gradient
        + 2 * tokens * (2 * dim + 3 * heads + 3 * kv_heads)  # attention: two norms, its inputs and its outputs
        + 4 * tokens * (dim + 128)  # the router
        + 2 * rows * (4 * dim + 4 * wide),  # sent, received, and returned twice; inside the experts
    }
    assert found.peak == pytest.approx(held, rel=0.05)
    # A rank sends all its rows and gets them back, forward, when it computes again, and backward.
    assert found.moved["all-to-all"] == pytest.approx(6 * num_layers * 2 * rows * dim, rel=1e-3)
    scattered = 4 * (num_layers * (block + here) + 2 * ends + dim)
    assert found.moved["reduce-scatter"] == pytest.approx(scattered, rel=5e-3)  # rows that do not divide are padded


def test_a_rank_with_twice_the_load_holds_what_the_dry_run_says() -> None:
    def twice(exchange: Exchange, own: object, theirs: object, num_rows: int) -> tuple[list[int], list[int]]:
        even, _ = even_sizes(exchange, own, theirs, num_rows)
        return even, [2 * count for count in even]

    even_sizes = experts.even_sizes
    said = of_235b(3)
    with mock.patch.object(experts, "even_sizes", twice):
        found = of_235b(3)
    assert found.peak_bytes > 1.2 * said.peak_bytes
    assert said.at_twice_the_load == pytest.approx(found.peak_bytes, rel=0.02)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_a_pipeline_with_experts_is_estimated_rank_by_rank(recompute: str, capsys: pytest.CaptureFixture) -> None:
    options = [*TINY, "--parallelism.pipeline_parallel_degree", "2", "--parallelism.tensor_parallel_degree", "2"]
    options += ["--activation_checkpoint.mode", recompute, "--activation_checkpoint.selective_ac_option", "op"]
    config, blueprint = load_run(["--job.config_file", FILE, "--validation.no_enable", *options], 16)
    estimates = dry_run(config, blueprint, Place(0, 0, 16))
    printed = capsys.readouterr().out
    assert [each.rank for each in estimates] == [0, 8] and "all-to-all" in printed
    assert re.search(r"a rank whose experts get twice as many tokens holds [\d.]+ [MG]iB", printed)
