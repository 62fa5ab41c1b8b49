"""The dry run: what it counts, prints and refuses. tests/recipe/distributed compares its estimates with real memory."""

import functools
import itertools
import math
import re
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.recipe.own_model import any_models
from tests.tiny_runs import TINY, tiny_config
from torchtitan.config.schema import Config
from torchtitan.hardware import Place
from torchtitan.models.decoder.args import parts
from torchtitan.models.decoder.model import TransformerBlock
from torchtitan.models.families import load_run, plan_model
from torchtitan.models.layers import FeedForward
from torchtitan.models.llama.args import LlamaArgs
from torchtitan.tools.dry_run import cut as fit
from torchtitan.tools.dry_run import report as dry_run_report
from torchtitan.tools.dry_run.cut import what_is_cut
from torchtitan.tools.dry_run.estimate import Estimate, derived, estimate, with_counts
from torchtitan.tools.dry_run.footprint import Footprint
from torchtitan.tools.dry_run.replay import Replay
from torchtitan.tools.dry_run.report import bars, verdict
from torchtitan.tools.dry_run.structure import structure

pytestmark = pytest.mark.slow

CONFIGS = sorted((Path(__file__).resolve().parents[3] / "train_configs").glob("*.toml"))
UNCOMPILED = ("--compile.no_enable", "--parallelism.no_enable_async_tensor_parallel")
VOCABULARY = 2048  # of the test assets' tokenizer

BF16 = {"training__mixed_precision_param": "bfloat16"}
TP = {"parallelism__tensor_parallel_degree": 2}
CP = {"parallelism__context_parallel_degree": 2}
PP = {"parallelism__pipeline_parallel_degree": 2}
FULL = {"activation_checkpoint__mode": "full"}
ACCUMULATING = {"training__local_batch_size": 2}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "FSDP": (4, BF16 | ACCUMULATING),
    "FSDP, accumulating": (2, BF16 | ACCUMULATING),
    "FSDP, full recompute": (4, BF16 | ACCUMULATING | FULL),
    "HSDP, recompute by operation": (
        4,
        ACCUMULATING | {"parallelism__data_parallel_replicate_degree": 2, "activation_checkpoint__mode": "selective"},
    ),
    "one rank, every second block recomputed, documents apart": (
        1,
        FULL
        | {
            "activation_checkpoint__mode": "selective",
            "activation_checkpoint__selective_ac_option": "2",
            "model__attn_mask_type": "block_causal",
        },
    ),
    "TP": (2, BF16 | TP),
    "TP, full recompute": (2, TP | FULL),
    "CP x TP": (4, CP | TP),
    "CP, documents apart, tied": (2, CP | {"model__attn_mask_type": "block_causal", "model__flavor": "tiny-tied"}),
    "PP": (2, BF16 | PP),
    "PP, full recompute, accumulating": (2, BF16 | PP | FULL | {"training__local_batch_size": 4}),
    "PP x FSDP, tied, interleaved": (
        4,
        BF16
        | PP
        | {
            "training__local_batch_size": 4,
            "model__flavor": "tiny-tied",
            "parallelism__pipeline_parallel_schedule": "Interleaved1F1B",
        },
    ),
}


def dry_run(config: Config, place: Place) -> list[Estimate]:
    return dry_run_report.dry_run(config, plan_model(config), place)


def estimate_tiny(world_size: int, rank: int = 0, replay: bool = True, **overrides: Any) -> Estimate:
    config = tiny_config("unused", world_size, **overrides)
    return estimate(config, plan_model(config).with_vocabulary(VOCABULARY), rank, world_size, replay=replay)


# A small one and one of each decoder. test_readme.py estimates 70B; it and the others take up to half a minute.
OFTEN = "debug_model", "llama3_8b", "qwen3_0.6b"


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, id=path.stem, marks=() if path.stem in OFTEN else pytest.mark.all) for path in CONFIGS],
)
def test_every_shipped_configuration_fits_the_gpus_its_header_states(path: Path) -> None:
    header = path.read_text().partition("[job]")[0]
    gigabytes = re.search(r"GPUs of (\d+) GB", header)
    world_size = math.prod(map(int, re.findall(r"(?:NGPU|NNODES)=(\d+)", header)))
    config, blueprint = load_run(
        ["--job.config_file", str(path), "--comm.mode", "fake_backend", *UNCOMPILED], world_size
    )
    if (degree := config.parallelism.pipeline_parallel_degree) > 1:
        # 405B: the first pipeline rank, which holds most microbatches, and the last, which has the output
        ends = 0, world_size // degree * (degree - 1)
        estimates = [estimate(config, blueprint, rank, world_size) for rank in ends]
    else:
        estimates = dry_run(config, Place(0, 0, world_size))
    verdict(estimates, [(int(gigabytes[1]) if gigabytes else 80) * 10**9] * len(estimates))


@pytest.mark.parametrize("name", [name for name in LAYOUTS if name not in ("FSDP", "TP", "PP", "CP x TP")])
def test_replaying_one_block_estimates_what_running_all_does(name: str) -> None:
    world_size, overrides = LAYOUTS[name]
    replayed, run = (estimate_tiny(world_size, replay=replay, **overrides) for replay in (True, False))
    assert replayed.moved == run.moved
    assert replayed.peak_bytes == run.peak_bytes


def with_unlike_feed_forwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hidden size of every second block is twice as large."""

    def build(self: FeedForward, dim: int, hidden_dim: int) -> None:
        build_plain(self, dim, hidden_dim * (1 + next(numbers) % 2))

    build_plain, numbers = FeedForward.__init__, itertools.count()
    monkeypatch.setattr(FeedForward, "__init__", build)


def with_skipped_feed_forwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every second block has the same weights and leaves half of them unused."""

    def build(self: TransformerBlock, args: LlamaArgs, *others: Any) -> None:
        build_plain(self, args, *others)
        self.skips = next(numbers) % 2 == 1

    def run(self: TransformerBlock, x: Tensor, *rest: Any) -> Tensor:
        return x + self.attention(self.attention_norm(x), *rest) if self.skips else run_plain(self, x, *rest)

    build_plain, run_plain, numbers = TransformerBlock.__init__, TransformerBlock.forward, itertools.count()
    monkeypatch.setattr(TransformerBlock, "__init__", build)
    monkeypatch.setattr(TransformerBlock, "forward", run)


@pytest.mark.parametrize("name", ["FSDP, full recompute", "CP x TP"])
@pytest.mark.parametrize("change", [with_unlike_feed_forwards, with_skipped_feed_forwards])
def test_blocks_of_one_class_that_differ_are_each_run(
    change: Callable, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    change(monkeypatch)
    world_size, overrides = LAYOUTS[name]
    replayed, run = (estimate_tiny(world_size, replay=replay, **overrides) for replay in (True, False))
    assert replayed == run


class Block(nn.Module):
    """A block whose work depends on more than the shapes of its weights."""

    def __init__(self, activation: Callable = torch.relu, num_times: int = 1) -> None:
        super().__init__()
        self.linear, self.activation, self.options = nn.Linear(8, 8), activation, {"num_times": num_times}

    def forward(self, x: Tensor, mask: Tensor, scaled: bool = False) -> Tensor:
        for _ in range(self.options["num_times"]):
            x = x + self.activation(self.linear(x)) * mask
        return x * mask.cos() if scaled else x


def gated(block: Block) -> Block:
    block.linear.register_forward_hook(lambda module, inputs, output: output * output.sigmoid())
    return block


def tied(block: Block) -> Block:
    block.second = block.linear
    return block


def run_blocks(makers: list[Callable[[], Block]], replayed: bool, **last: Any) -> tuple[int, dict[str, int]]:
    """How many blocks ran, and the peak; `last` are arguments of the last block."""
    with FakeTensorMode() as fake, Footprint(fake) as footprint:
        replay, blocks = Replay(footprint), [make() for make in makers]
        footprint.mark(nn.ModuleList(blocks).parameters(), "parameters")
        if replayed:
            replay.apply(blocks)
        mask, x = torch.empty(4, 1), torch.empty(4, 8, requires_grad=True) * 1
        for block in blocks[:-1]:
            x = block(x, mask)
        blocks[-1](x, mask, **last).square().sum().backward()
        footprint.mark((p.grad for block in blocks for p in block.parameters() if p.grad is not None), "gradients")
        return len(replay.records), footprint.peak()


@pytest.mark.parametrize(
    ("other", "last"),
    [
        (lambda: Block(), {"scaled": True}),
        (lambda: Block(F.silu), {}),
        (lambda: Block(num_times=2), {}),
        (lambda: gated(Block()), {}),
        (lambda: Block(lambda x: x * x), {}),
    ],
    ids=["a flag at the call", "another function", "another number", "a hook", "a lambda"],
)
def test_each_difference_in_work_makes_a_record(other: Callable[[], Block], last: dict[str, Any]) -> None:
    records, replayed = run_blocks([Block, Block, other], replayed=True, **last)
    assert (records, replayed) == (2, run_blocks([Block, Block, other], replayed=False, **last)[1])


def test_blocks_that_are_alike_share_one_record() -> None:
    def make() -> Block:
        return tied(gated(Block(functools.partial(F.leaky_relu, negative_slope=0.1))))

    assert run_blocks([make, make, make], replayed=True)[0] == 1


def test_an_attribute_of_an_attribute_and_a_cycle_are_part_of_the_structure() -> None:
    def structure_of(scale: float) -> Any:
        options = types.SimpleNamespace(scale=scale)
        options.itself = options
        return structure([options, {1, 2}, functools.partial(torch.relu, options)])

    assert structure_of(1.0) == structure_of(1.0) != structure_of(2.0)
    assert structure(1) != structure(True)


def test_fsdp_gathers_each_blocks_parameters_twice_and_scatters_each_gradient_once() -> None:
    block = 4 * 4 * parts(TINY, 1)[1].parameters  # 4 layers, 4 bytes
    embedding, end = 4 * VOCABULARY * TINY.dim, 4 * (VOCABULARY + 1) * TINY.dim
    assert estimate_tiny(2, training__local_batch_size=4).moved == {
        # What ends forward begins backward and is kept in between; backward of the embedding needs no weights.
        "all-gather": embedding + 2 * block + end,
        "reduce-scatter": embedding + block + end,
        "all-reduce": 8 + 8,  # the number of tokens, the gradient norm
    }


def test_a_stage_sends_each_microbatch_forward_and_receives_its_gradient() -> None:
    activations = 4 * 8 * 64 * TINY.dim  # 8 microbatches of one sequence of 64 tokens
    moved = estimate_tiny(2, **PP).moved
    vote = 4  # whether shapes are known, to the next stage and back
    assert (moved["send"], moved["recv"]) == (activations + vote, activations + vote)


def test_an_update_in_backward_never_holds_all_gradients() -> None:
    sizes = {"training__seq_len": 16, "training__local_batch_size": 1, "training__global_batch_size": 1}
    options = sizes | {"training__max_norm": math.inf, "training__mixed_precision_param": "bfloat16"}
    plain = estimate_tiny(1, **options)
    early = estimate_tiny(1, optimizer__early_step_in_backward=True, **options)
    assert plain.peak["gradients"] == plain.peak["parameters"]
    assert early.peak["gradients"] < plain.peak["gradients"] / 2 and early.peak_bytes < plain.peak_bytes


def test_one_rank_holds_all_parameters_gradients_and_two_states_of_each() -> None:
    found = estimate_tiny(1)
    size = 4 * found.parameters
    assert found.peak["parameters"] == size
    assert found.peak["optimizer"] == pytest.approx(2 * size, rel=1e-3)  # and the count of steps
    assert found.peak["gradients"] <= size


def test_a_dry_run_needs_no_data_and_leaves_no_run_folder(tmp_path: Path, capsys) -> None:
    nowhere = {"training__dataset_path": str(tmp_path / "none"), "model__hf_assets_path": str(tmp_path / "none")}
    options = {"comm__mode": "fake_backend", "model__vocab_size": 5000, "training__global_batch_size": 32}
    dry_run(tiny_config(tmp_path / "run", 8, **PP, **options, **nowhere), Place(0, 0, 8))
    assert not (tmp_path / "run").exists()
    table = capsys.readouterr().out.splitlines()[2:]
    assert [line.split()[0] for line in table if line.endswith("passes")] == ["0", "4"]
    assert [line.split()[0] for line in table if "■ " in line and " stage " in line] == ["0", "4"]


def test_a_compiled_swiglu_saves_what_the_estimate_says() -> None:
    """Its input and two hidden activations, and their product for the weight behind it; not the SiLU."""
    module = FeedForward(8, 32)

    def saved(run: Callable[[Tensor], Tensor]) -> list[int]:
        kept: dict[int, int] = {}

        def keep(tensor: Tensor) -> Tensor:
            kept[tensor.untyped_storage().data_ptr()] = tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            run(torch.randn(4, 8, requires_grad=True)).sum()
        weights = {weight.data_ptr() for weight in module.parameters()}
        return sorted(size for place, size in kept.items() if place not in weights)

    assert saved(module) == [32, 128, 128, 128, 128]
    assert saved(torch.compile(module, backend="aot_eager_decomp_partition")) == [32, 128, 128, 128]


def test_of_a_compiler_only_the_silu_that_it_recomputes_is_known(tmp_path: Path) -> None:
    compiled = {"compile__enable": True, "parallelism__enable_async_tensor_parallel": True}
    plain, other = (dry_run(tiny_config(tmp_path, 2, **TP, **o), Place(0, 0, 2)) for o in ({}, compiled))
    assert [(one.parameters, one.moved) for one in plain] == [(one.parameters, one.moved) for one in other]
    assert plain[0].peak_bytes > other[0].peak_bytes > 0.7 * plain[0].peak_bytes


@pytest.mark.parametrize(
    ("rank", "options", "message"),
    [
        (1, {}, "RANK=1, but one process plays all ranks; start it without torchrun, as WORLD_SIZE=2"),
        (
            0,
            {"training__enable_cpu_offload": True},
            "enable_cpu_offload = true cannot be estimated: .*; set it to false",
        ),
        (
            0,
            {"activation_checkpoint__mode": "memory_budget", "compile__enable": True},
            'activation_checkpoint.mode = "memory_budget" cannot be estimated: .*; use "selective"',
        ),
        (
            0,
            {"model__converters": ["quantize.linear.float8"]},
            "model.converters = .* cannot be estimated.*; leave it out",
        ),
    ],
)
def test_what_cannot_be_estimated_is_refused(tmp_path: Path, rank: int, options: dict, message: str) -> None:
    config = tiny_config(tmp_path, 2, training__local_batch_size=4, comm__mode="fake_backend", **options)
    with pytest.raises(ValueError, match=message):
        dry_run(config, Place(rank, rank, 2))


def test_bars_show_what_fills_a_rank() -> None:
    sizes = ({"parameters": 1 << 30, "activations": 1 << 30}, {"parameters": 1 << 30, "gradients": 3 << 30})
    first, second = bars([Estimate(8 * rank, 0, peak, {}) for rank, peak in enumerate(sizes)]).splitlines()[1:]
    assert first == f"    0 {'█' * 15}{'░' * 15} 2.00 GiB" and second == f"    8 {'█' * 15}{'▓' * 45} 4.00 GiB"


def test_a_rank_that_does_not_fit_is_refused() -> None:
    sizes = ({"parameters": 2 * 2**30}, {"parameters": 3 * 2**30})
    estimates = [Estimate(rank, 0, peak, {}) for rank, peak in enumerate(sizes)]
    assert "rank 1 holds 3.00 GiB at its peak, and its GPU has 3.00" in verdict(estimates, [3 * 2**30] * 2)
    with pytest.raises(ValueError, match="rank 1 holds 3.00 GiB at its peak, but its GPU has 2.50 GiB; use more"):
        verdict(estimates, [3 * 2**30, 5 * 2**29])


SKIPPING = {"model__name": "tests.recipe.own_model.any_models:SKIPPING", "model__flavor": "tiny"}


@pytest.mark.parametrize("model", [{"model__flavor": "tiny-deep", "model__n_layers": 3}, SKIPPING])
def test_the_fastest_cut_that_fits_the_ranks_memory_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: dict[str, Any]
) -> None:
    """Against the estimates of all cuts."""
    config = tiny_config(tmp_path, 2, **PP, **model)
    blueprint = derived(config, plan_model(config), 2)
    parts, _ = what_is_cut(config, blueprint)
    flops, cuts = [part.flops for part in parts], [(n, len(parts) - n) for n in range(1, len(parts))]

    @functools.cache
    def estimated(cut: tuple[int, int], rank: int) -> Estimate:
        return estimate(with_counts(config, cut), blueprint, rank, 2)

    def once(asked: Config, _: Any, rank: int, __: int) -> Estimate:
        assert asked.parallelism.pipeline_parallel_layer_counts
        return estimated(tuple(asked.parallelism.pipeline_parallel_layer_counts), rank)  # type: ignore[arg-type]

    def found(limits: Sequence[int]) -> tuple[int, ...]:
        given = config.parallelism.model_copy(update={"pipeline_parallel_memory_gib": [n / 2**30 for n in limits]})
        return tuple(fit.fit(config.model_copy(update={"parallelism": given}), blueprint, 2))

    monkeypatch.setattr(fit, "estimate", once)
    peaks = {cut: tuple(estimated(cut, rank).peak_bytes for rank in range(2)) for cut in cuts}
    for limits in [(1 << 40, 1 << 40), *peaks.values(), (1 << 40, peaks[cuts[-2]][1]), (peaks[cuts[0]][0], 1 << 40)]:
        fitting = [cut for cut in cuts if all(p <= n for p, n in zip(peaks[cut], limits, strict=True))]
        slowest = {cut: max(sum(flops[: cut[0]]), sum(flops[cut[0] :])) for cut in fitting}
        assert slowest[found(limits)] == min(slowest.values())  # type: ignore[index]
    with pytest.raises(ValueError, match=r"none of the \d+ cuts tried fits; of \[.*\] a rank needs .* times"):
        found([1000, 1000])


@pytest.mark.parametrize(("world_size", "layout"), [(1, {}), (2, {}), (2, PP), (4, PP)])
def test_a_module_of_ones_own_is_estimated_like_a_family(tmp_path: Path, world_size: int, layout: dict) -> None:
    dp = world_size // (2 if layout else 1)
    config = tiny_config(tmp_path, world_size, **SKIPPING, **layout, training__local_batch_size=8 // dp)
    stages = [estimate(config, plan_model(config), rank, world_size) for rank in range(0, world_size, dp)]
    assert sum(stage.parameters for stage in stages) == sum(p.numel() for p in any_models.Skipping().parameters())
    for stage in stages:  # a shard is padded to whole rows
        assert stage.peak["optimizer"] == pytest.approx(8 * stage.parameters / dp, rel=0.25)
        assert stage.peak["activations"] > 0 and (stage.moved.get("all-gather", 0) > 0) == (dp > 1)


def test_a_module_of_ones_own_is_cut_to_the_memory_of_its_ranks(tmp_path: Path) -> None:
    rich: dict[str, Any] = {"parallelism__pipeline_parallel_memory_gib": [1.0, 1.0], "training__local_batch_size": 8}
    config = tiny_config(tmp_path, 2, **SKIPPING, **PP, **rich)
    counts = fit.fit(config, plan_model(config), 2)
    assert len(counts) == 2 and 0 not in counts


def test_a_weight_that_no_plan_splits_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A change of the model alone leads to such a weight, and each rank would train it on its part of the sequence."""

    def build_with_a_norm(self: FeedForward, dim: int, hidden_dim: int) -> None:
        build_plain(self, dim, hidden_dim)
        self.hidden_norm = nn.RMSNorm(hidden_dim)

    build_plain = FeedForward.__init__
    monkeypatch.setattr(FeedForward, "__init__", build_with_a_norm)
    with pytest.raises(ValueError, match="degree = 2, but nothing says how ranks share layers.0.feed_forward.hidden_n"):
        dry_run(tiny_config(tmp_path, 2, **TP), Place(0, 0, 2))
