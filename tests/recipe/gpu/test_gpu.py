"""Tests that need a GPU: it trains, it agrees with the CPU, and the host waits for it only at logged steps."""

import gc
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend
from torch.utils.checkpoint import checkpoint

from benchmarks.recipe.where import shares
from tests.recipe.distributed.test_any_model import keys
from tests.recipe.distributed.test_layouts import OPTIONS, differences, of_one_process, with_option
from tests.recipe.tools.measured_peak import train
from tests.stored_models import VOCAB
from tests.tiny_runs import tiny_config, train_here
from torchtitan import hardware
from torchtitan.launch.preflight.facts import check_gpus
from torchtitan.models.families import plan_model
from torchtitan.models.layers import CausalAttention
from torchtitan.parallel.collectives import GlobalNorm, set_timeout, start_process_group, stop_process_group
from torchtitan.parallel.documents.attention import DocumentAttention, attend
from torchtitan.parallel.gpu_attention import Case, attends_by_document, attention_by, installed, pick_attention
from torchtitan.parallel.recompute import keep_expensive_operations
from torchtitan.tools.dry_run.estimate import estimate

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # torch looks once, at the first product; a test needs it
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    """A run that failed leaves nothing to the next test."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
    torch.use_deterministic_algorithms(False)
    gc.collect()
    torch.cuda.empty_cache()


def test_a_gpu_trains_in_bfloat16_and_the_loss_falls(tmp_path: Path) -> None:
    records = train_here(
        tiny_config(tmp_path, training__steps=30, training__mixed_precision_param="bfloat16", compile__enable=True)
    )
    assert records[-1]["loss"] < records[0]["loss"] - 0.5
    assert records[-1]["memory_gib"] > 0


@pytest.fixture(scope="module")
def first_weights(tmp_path_factory: pytest.TempPathFactory) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Keys with which a run begins with a model's weights as a CPU drew them: a GPU draws others."""
    stored: dict[str, dict[str, Any]] = {}

    def of_model(overrides: dict[str, Any]) -> dict[str, Any]:
        model = {key: value for key, value in overrides.items() if key.startswith("model__")}
        if str(model) not in stored:
            folder = tmp_path_factory.mktemp("first")
            config = tiny_config(folder, **model, checkpoint__enable=True, checkpoint__create_seed_checkpoint=True)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(hardware, "pick_device", lambda _: torch.device("cpu"))
                train_here(config)
            path = str(folder / "checkpoint")
            stored[str(model)] = {"checkpoint__enable": True, "checkpoint__initial_load_path": path}
        return stored[str(model)]

    return of_model


MORE: dict[str, dict[str, Any]] = {
    "plain": {},
    "Muon": {"optimizer__name": "Muon"},
    "experts, balanced by a loss": {"model__name": "tests.tiny_models:EXPERTS", "model__balance": "loss"},
    "experts, balanced by a bias": {"model__name": "tests.tiny_models:EXPERTS", "model__balance": "bias"},
}


@pytest.mark.parametrize("option", [*MORE, *(option for option in OPTIONS if option != "bfloat16")])
def test_a_gpu_trains_as_a_cpu_does_in_float32(
    tmp_path: Path, first_weights: Callable[[dict[str, Any]], dict[str, Any]], option: str
) -> None:
    """One rank over NCCL is held to the bars of any layout, with what does not change a run's numbers beside it."""
    overrides = dict(MORE[option]) if option in MORE else with_option({}, option)
    overrides |= first_weights(overrides)
    if "compile__backend" in overrides:
        overrides["compile__backend"] = "inductor"
    on_gpu = train_here(tiny_config(tmp_path / "gpu", **overrides))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hardware, "pick_device", lambda _: torch.device("cpu"))
        on_cpu = train_here(tiny_config(tmp_path / "cpu", **of_one_process(overrides)))
    rounds = 100 if option == "Muon" else 1  # to bfloat16, and where sums fall on the other side the update differs
    assert differences(on_gpu, on_cpu, "loss") <= 1e-5 * rounds
    assert differences(on_gpu, on_cpu, "grad_norm") <= 1e-4 * rounds


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_casts_train_as_fsdp_on_one_rank_does(tmp_path: Path, dtype: str) -> None:
    """With a setting that keeps FSDP, whose one reduction runs on a stream of its own."""
    options = {"training__mixed_precision_param": "bfloat16", "training__dtype": dtype, "training__local_batch_size": 4}
    alone = train_here(tiny_config(tmp_path / "alone", **options))
    fsdp = train_here(tiny_config(tmp_path / "fsdp", **options, parallelism__fsdp_reshard_after_forward="never"))
    assert differences(alone, fsdp, "loss") <= 1e-5 and differences(alone, fsdp, "grad_norm") <= 1e-4


def test_a_gpu_resumes_to_the_bit(tmp_path: Path) -> None:
    """The checkpoint is written from pinned memory while the GPU goes on, and a step after it."""
    saving = {"lr_scheduler__total_steps": 6, "debug__deterministic": True, "checkpoint__enable": True}
    saving |= {"checkpoint__async_mode": "async_with_pinned_mem", "checkpoint__interval": 2}
    through = train_here(tiny_config(tmp_path / "through", **saving, training__steps=6))
    train_here(tiny_config(tmp_path / "in two", **saving, training__steps=4))
    in_two = train_here(tiny_config(tmp_path / "in two", **saving, training__steps=6))
    exact = [[(record["loss"], record["grad_norm"]) for record in records] for records in (through, in_two)]
    assert exact[0] == exact[1] and len(exact[0]) == 6


APART = {"model__attn_mask_type": "block_causal", "training__mixed_precision_param": "bfloat16"}


@pytest.mark.parametrize(
    "model",
    [{}, APART, APART | {"compile__enable": True}, keys("GPT2") | {"validation__enable": False}],
    ids=["Llama", "documents apart", "documents apart, compiled", "own model"],
)
def test_the_host_waits_for_the_gpu_only_at_logged_steps(tmp_path: Path, model: dict[str, Any]) -> None:
    """Counts torch's warnings of synchronisation: eight more steps, with two more log records, may add only two.

    The waits of transformers, which looks at the values of its masks, are its own.
    """
    counts = []
    for steps in (4, 12):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                train_here(tiny_config(tmp_path, **model, training__steps=steps, metrics__log_freq=4))
            finally:
                torch.cuda.set_sync_debug_mode("default")
        waits = [warning for warning in caught if "called a synchronizing CUDA operation" in str(warning.message)]
        counts.append(sum("transformers" not in Path(warning.filename).parts for warning in waits))
    assert counts[1] - counts[0] == 2


@pytest.mark.parametrize("offloads", [False, True])
def test_float16_trains_as_float32_does(tmp_path: Path, offloads: bool) -> None:
    """Its losses are scaled by a factor that stays on the GPU, also where the parameters are on the host."""
    options = {"training__mixed_precision_param": "float16", "training__enable_cpu_offload": offloads}
    plain = train_here(tiny_config(tmp_path / "float32"))
    scaled = train_here(tiny_config(tmp_path / "float16", **options))
    assert differences(scaled, plain, "loss") <= 1e-2


def test_moments_in_bfloat16_are_rounded_alike_compiled_or_not(tmp_path: Path) -> None:
    options = {"optimizer__moments_dtype": "bfloat16"}
    plain = train_here(tiny_config(tmp_path / "plain", **options))
    compiled = train_here(tiny_config(tmp_path / "compiled", **options, compile__enable=True))
    assert differences(compiled, plain, "loss") <= 1e-3


def test_a_models_phases_and_its_trace_say_where_a_steps_time_goes(tmp_path: Path) -> None:
    options = {"profiling__enable_profiling": True, "profiling__profile_freq": 10, "metrics__log_freq": 5}
    records = train_here(tiny_config(tmp_path, **options, training__seq_len=512, training__global_batch_size=16))
    last = records[-1]
    assert 0 < last["forward_backward_seconds"] + last["update_seconds"] <= 1.1 * last["step_seconds"]
    found = shares(next(tmp_path.rglob("rank0.json")))
    assert sum(found.values()) == pytest.approx(1) and found["matrix products"] > 0 and found["optimizer"] > 0


def test_collectives_of_a_gpu_and_of_the_host_go_through_one_group() -> None:
    """All that one rank can show of NCCL: it starts, takes a timeout, reduces and ends, beside gloo."""
    device = torch.device("cuda", 0)
    start_process_group(device, 0, 1, 60)
    try:
        set_timeout(30, [])
        for place in (device, torch.device("cpu")):
            numbers = torch.arange(4.0, device=place)
            dist.all_reduce(numbers)
            dist.broadcast(numbers, src=0)
            assert numbers.tolist() == [0, 1, 2, 3]
        norm = GlobalNorm()
        norm.add(torch.full((3, 3), 2.0, device=device), torch.ones(13, device=device))
        assert norm.total().item() == 7
    finally:
        stop_process_group()


def test_parameters_kept_on_the_host_train_as_those_on_the_gpu_do(tmp_path: Path) -> None:
    """Both start from the same values. With offload the CPU computes the update, so it may round differently."""
    on_gpu = train_here(tiny_config(tmp_path / "gpu"))
    on_host = train_here(tiny_config(tmp_path / "host", training__enable_cpu_offload=True))
    for ours, reference in zip(on_host, on_gpu, strict=True):
        assert ours["loss"] == pytest.approx(reference["loss"], rel=1e-4)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_float8_trains_as_its_emulation_does(tmp_path: Path, recipe: str) -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU does not multiply in float8")
    options = {
        "model__converters": ["quantize.linear.float8"],
        "quantize__linear__float8__recipe_name": recipe,
        "training__mixed_precision_param": "bfloat16",
    }
    real = train_here(tiny_config(tmp_path / "real", **options))
    emulated = train_here(tiny_config(tmp_path / "emulated", **options, quantize__linear__float8__emulate=True))
    for ours, reference in zip(real, emulated, strict=True):
        assert ours["loss"] == pytest.approx(reference["loss"], rel=5e-3)


def test_memory_snapshots_are_written(tmp_path: Path) -> None:
    options = {"profiling__enable_memory_snapshot": True, "profiling__profile_freq": 4}
    train_here(tiny_config(tmp_path, training__steps=4, **options))
    assert (tmp_path / "memory_snapshot/step_4/rank0.pickle").stat().st_size > 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_a_dry_run_estimates_what_a_gpu_allocates(recompute: str, dtype: str) -> None:
    overrides = {
        "model__name": "llama3",
        "model__flavor": "debugmodel",
        "training__seq_len": 2048,
        "activation_checkpoint__mode": recompute,
        "training__dtype": dtype,
    }
    config = tiny_config("unused", **overrides, training__mixed_precision_param="bfloat16")
    blueprint = plan_model(config).with_vocabulary(VOCAB)
    device = torch.device("cuda", 0)
    start_process_group(device, 0, 1, 60)
    try:
        train(config, 1, device)  # a first run, so that libraries allocate their own memory now
        torch.cuda.synchronize()
        gc.collect()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        train(config, 1, device)
        measured = torch.cuda.max_memory_allocated() - before
    finally:
        stop_process_group()
    assert estimate(config, blueprint, rank=0, world_size=1).peak_bytes == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("keeps_apart", [False, True])
def test_attention_runs_by_the_kernel_that_is_named(keeps_apart: bool, dtype: torch.dtype) -> None:
    device = torch.device("cuda", 0)
    name, fastest = pick_attention(Case(device, dtype, 8, 2, 64, 128, keeps_apart))
    q, k = (torch.randn(1, 128, heads, 64, device=device, dtype=dtype) for heads in (8, 2))
    starts = torch.tensor([[0, 50, 128]], dtype=torch.int32, device=device) if keeps_apart else None
    core = (
        DocumentAttention(CausalAttention(), not attends_by_document(dtype, 64)) if keeps_apart else CausalAttention()
    )
    with fastest, torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        core(q.requires_grad_(), k, k, starts)
    operations = {event.key for event in profile.key_averages()}
    parts = {"cuDNN": "cudnn", "FlashAttention,": "varlen", "FlashAttention": "flash", "memory-efficient": "efficient"}
    part = next(part for kernel, part in parts.items() if name.startswith(kernel))
    assert any(f"_{part}_att" in operation for operation in operations)


@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.parametrize("keeps_apart", [False, True])
@pytest.mark.parametrize("package", ["FA3", "FA4"])
def test_an_installed_flash_attention_attends_as_torchs_own(package: str, keeps_apart: bool, compiles: bool) -> None:
    """Forward and backward of grouped heads, in a block that recomputes but keeps attention's results."""
    if package not in installed(torch.cuda.get_device_capability()[0]):
        pytest.skip(f"{package} is not installed, or not for this GPU")
    torch.manual_seed(0)
    drawn = [torch.randn(2, 1024, heads, 128, device="cuda", dtype=torch.bfloat16) for heads in (8, 2, 2)]
    cuts = [[0, 300, *[1024] * 14], [0, 512, *[1024] * 14]]  # padded as data.documents does
    starts = torch.tensor(cuts, dtype=torch.int32, device="cuda")
    core, third = (DocumentAttention(CausalAttention(), False), starts) if keeps_apart else (CausalAttention(), None)

    def block(*inputs: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = checkpoint(core, *inputs, third, use_reentrant=False, context_fn=keep_expensive_operations)
        return out

    results = []
    for name in ("", package):
        torch.compiler.reset()
        inputs = [tensor.clone().requires_grad_() for tensor in drawn]
        with attention_by([SDPBackend.FLASH_ATTENTION], name):
            out = (torch.compile(block, fullgraph=True) if compiles else block)(*inputs)
            out.backward(torch.cos(torch.arange(out.numel(), device="cuda")).view_as(out).to(out.dtype))
        results.append([out, *(tensor.grad for tensor in inputs)])
    for reference, ours in zip(*results, strict=True):
        assert (ours - reference).abs().max() <= 3e-2 * reference.abs().max()
    assert any((ours != reference).any() for reference, ours in zip(*results, strict=True))  # another kernel


@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.parametrize("part", [(0, 1024), (256, 512), (768, 1024)], ids=["all", "middle", "end"])
def test_documents_stay_apart_on_a_gpu_as_under_a_mask(part: tuple[int, int], compiles: bool) -> None:
    """Forward and backward, also of a part's queries, as a rank of context parallelism has them."""
    torch.manual_seed(0)
    first, end = part
    cuts = [[0, 5, 6, 300, 301, 900, 1024], [0, 512, 513, 768, 1024, 1024, 1024]]
    starts = torch.tensor([[*cut, 1024] for cut in cuts], dtype=torch.int32, device="cuda")
    shapes = (2, end - first, 8, 64), (2, end, 2, 64), (2, end, 2, 64)
    drawn = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes]
    results = []
    for by_mask in (True, False):
        q, k, v = ((tensor.float() if by_mask else tensor).detach().requires_grad_() for tensor in drawn)
        kernel = torch.compile(attend, fullgraph=True) if compiles and not by_mask else attend
        out = kernel(q, k, v, starts, CausalAttention() if by_mask else None)
        out.backward(torch.cos(torch.arange(out.numel(), device="cuda")).view_as(out).to(out.dtype))
        results.append([out, q.grad, k.grad, v.grad])
    for reference, ours in zip(*results, strict=True):
        assert ours.dtype == torch.bfloat16 and (ours - reference).abs().max() <= 3e-2 * reference.abs().max()


def test_a_preflight_finds_the_gpus_sound_and_knows_their_speed() -> None:
    devices = check_gpus()
    assert len(devices) == torch.cuda.device_count() and not any(device["problems"] for device in devices)
    assert all(device["tflops"] > 1 and device["driver_version"] for device in devices)
